"""One config chooses a model's kernels: the loss curve stays, and the logits are never stored.

`OpsConfig.auto(model=model)` chooses the fastest kernels that can run here; on a CPU that is the loss in chunks.
"""

from __future__ import annotations

import torch
import transformers

import kernel_compat
from kernel_compat import ops


def curve(config: ops.OpsConfig | None, steps: int = 8) -> list[float]:
    """The losses of some steps, with the kernels of `config`."""
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="flash_attention_reference")
    if config is not None:
        for binding in ops.apply_ops(model, config).bindings:
            print(f"{binding.op}: {binding.kernel}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(3, 500, (2, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    kernel_compat.install()
    eager, ours = curve(None), curve(ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss"))
    print("loss:", *(f"{loss:.3f}" for loss in ours))
    print("equal to eager's:", torch.allclose(torch.tensor(ours), torch.tensor(eager), atol=1e-4))
