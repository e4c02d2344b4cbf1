"""What context parallelism sends and computes a rank, on 2 to 1,024 ranks: counted from the library's plans, on a CPU.

Run by hand:

    python benchmarks/context_parallel_traffic.py [--measured FILE ...]

One causal sequence, a layer's forward in bfloat16, head dimension 128; the backward pass sends as much again and computes 2.5 times as
much. Times are a model, not measured: operations at --tflops, bytes within a node of 8 at --nvlink and others at --network, one after
the other. "keys": keys alone travel. "heads": as many ranks as possible share heads. "chosen": what the library takes.

With files that `context_parallel_gpu.py --json` wrote, the times of this model stand beside those measured: the kernel's alone, as measured,
what travels, and copies of rows at --memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from kernel_compat.attention.parallel.plan import Spread
from kernel_compat.attention.parallel.split import TokenSplit

HEADS = {"32/32": (32, 32), "32/8": (32, 8), "32/1": (32, 1)}
DIM, BYTES, NODE = 128, 2, 8


@cache
def spread_of(ranks: int) -> tuple[Spread, int]:
    """Of one sequence, with as few tokens as a zigzag can have: what travels grows with the tokens, and nothing else."""
    tokens = 2
    return Spread(
        TokenSplit.balanced([(0, ranks * tokens)], ranks * tokens, ranks), [(0, ranks * tokens)], 1, (True, (-1, -1))
    ), tokens


def of_a_rank(
    ranks: int, heads: tuple[int, int], head_ranks: int, tokens: int, args: argparse.Namespace
) -> tuple[float, float]:
    """The bytes that the average rank sends, and the time that they take."""
    spread, counted = spread_of(ranks)
    scale = tokens / counted * DIM * BYTES / ranks
    whole = spread.traffic(head_ranks, *heads) * scale
    of_heads = 2 * tokens * heads[0] * (head_ranks - 1) / head_ranks * DIM * BYTES
    rate = {True: args.nvlink * 1e9, False: args.network * 1e9}
    return whole, of_heads / rate[head_ranks <= NODE] + (whole - of_heads) / rate[ranks <= NODE]


def lines(tokens: int, args: argparse.Namespace) -> Iterator[str]:
    for name, heads in HEADS.items():
        for ranks in args.ranks:
            pairs = (ranks * tokens) ** 2 / 2 / ranks
            flops = 4 * pairs * DIM * heads[0]
            spread, _ = spread_of(ranks)
            most, chosen = spread.choices(*heads)[-1], spread.head_ranks(*heads)
            texts = [name, str(ranks), f"{flops / 1e12:.1f}", f"{flops / args.tflops / 1e9:.2f}"]
            for head_ranks in (1, most, chosen):
                sent, seconds = of_a_rank(ranks, heads, head_ranks, tokens, args)
                texts.append(f"{sent / 2**20:.0f} / {1e3 * seconds:.2f}")
            yield f"| {' | '.join([*texts, str(chosen)])} |"


def beside(cell: dict[str, Any], ranks: int, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: the times that the model predicts for a measured cell, and the measured times."""
    (heads, kv_heads, dim), lengths = cell["sizes"], [*pairwise([0, *accumulate(cell["lengths"])])]
    tokens, pattern = lengths[-1][1], (True, (-1, -1))
    spread = Spread(TokenSplit.balanced(lengths, tokens, ranks), lengths, 1, pattern)
    head_ranks = spread.head_ranks(heads, kv_heads)
    sent = spread.traffic(head_ranks, heads, kv_heads) / ranks * dim * BYTES
    copied = 0.0
    for rank in range(ranks):
        plan = spread.plan(rank, head_ranks, kv_heads, torch.device("cpu"))
        q_row, k_row = (n // units * dim * BYTES for n, units in zip((heads, kv_heads), plan.units, strict=True))
        selections = [(plan.to_queries.sent, 2 * k_row), (plan.keys, 2 * k_row), (plan.queries, 2 * q_row)]
        selections += [] if plan.to_heads is None else [(plan.to_heads.sent, 2 * q_row)]
        rows = sum(len(selection.index) * row for selection, row in selections if selection is not None)
        copied = max(copied, 2 * rows)  # read and written
    extra = 1e3 * (sent / args.nvlink / 1e9 + copied / args.memory / 1e9)
    for kernel in ("FA4", "FA2"):
        rows = {row["name"]: row["ms"] for row in cell["rows"] if row["kernel"] == kernel and row["ms"]}
        for mode, passes in (("forward", 1), ("forward+backward", 2)):
            alone, took = (statistics.median(rows[name][mode]) for name in ("the kernel alone", "ours, as chosen"))
            predicted = alone + passes * extra
            texts = [cell["layout"], str(cell["tokens"]), f"{heads}/{kv_heads}", kernel, mode]
            texts += [f"{predicted:.2f}", f"{took:.2f}", f"{predicted / took:.2f}"]
            yield f"| {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16, 64, 256, 1024])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768], help="a rank")
    parser.add_argument(
        "--tflops", type=float, default=600.0, help="of the kernel: FlashAttention-4's forward on an H200"
    )
    parser.add_argument("--nvlink", type=float, default=280.0, help="GB/s of a rank, as measured between two H200")
    parser.add_argument("--network", type=float, default=45.0, help="GB/s of a rank between nodes; assumed")
    parser.add_argument("--memory", type=float, default=4300.0, help="GB/s of a GPU's memory, read and written")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], help="files of context_parallel_gpu.py")
    args = parser.parse_args()
    if args.measured:
        print("| sequences | tokens a rank | heads | kernel | mode | model, ms | measured, ms | model over measured |")
        print("|---|---|---|---|---|---|---|---|")
    for path in args.measured:
        measured = json.loads(path.read_text())
        for cell in measured["cells"]:
            print("\n".join(beside(cell, int(measured["environment"]["ranks"]), args)))
    for tokens in args.tokens:
        print(f"\n{tokens} tokens a rank\n")
        print(
            "| heads | ranks | TFLOP | ms | keys, MiB / ms | heads, MiB / ms | chosen, MiB / ms | ranks that share heads |"
        )
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(lines(tokens, args)))


if __name__ == "__main__":
    main()
