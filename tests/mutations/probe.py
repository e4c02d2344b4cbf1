"""What the library computes and says on one copy of transformers, in a process forked from one that has imported torch.

``python probe.py`` reads a request a line: JSON with the folder of the copy (``path``), the new names of what was renamed
(``names``), the file of the expected results (``expected``) and where the findings go (``found``). It answers each with a line.
Expected results are those of eager attention on an unchanged copy: ``"write": true`` writes them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

NAME = "flash_attention_reference"
LENGTH, LENGTHS = 14, (5, 6, 3)
TOLERANCE = 1e-4
#: The longest time of a request, in seconds.
SECONDS = 240

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}

#: By model type: the class and the arguments of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SHAPE),
    "mistral": ("MistralForCausalLM", {**_SHAPE, "head_dim": 16, "sliding_window": 5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_SHAPE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "eos_token_id": 2, "bos_token_id": 1},
    ),
    "falcon_h1": ("FalconH1ForCausalLM", {**_SHAPE, **_MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1}),
    "bert": (
        "BertForMaskedLM",
        {name: value for name, value in _SHAPE.items() if name not in ("num_key_value_heads", "eos_token_id", "bos_token_id")},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


class Copy:
    """The models of one copy of transformers, spoken to in its own words.

    Attributes:
        names: the new names of arguments and attributes that were renamed.
    """

    def __init__(self, names: dict[str, str]) -> None:
        import inspect

        import transformers

        self.names = names
        taken = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
        self.cache = next((name for name in map(self.name, ("cache", "past_key_values")) if name in taken), "cache")

    def name(self, name: str) -> str:
        """An argument's or attribute's name here."""
        return self.names.get(name, name)

    def named(self, **values: Any) -> dict[str, Any]:
        """The values by their names here."""
        return {self.name(name): value for name, value in values.items()}

    def model(self, model_type: str, attention: str) -> Any:
        """The tiny model, with random weights that make attention matter."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        class_name, values = MODELS[model_type]
        config = CONFIG_MAPPING[model_type](**self.named(**values))
        for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout_rate"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        model = getattr(transformers, class_name)._from_config(config, **self.named(attn_implementation=attention))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1:
                    parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
        return model.float().eval()

    def run(self, model: Any, ids: Tensor, **values: Any) -> Any:
        """The output of a forward, with its cache as ``held``."""
        if type(model).__name__ == "BertForMaskedLM":  # it takes no such argument on older releases
            values.pop("use_cache", None)
        return model(**self.named(input_ids=ids, **values))

    def held(self, output: Any) -> Any:
        """The cache in an output."""
        return getattr(output, self.cache)


def _ids(rows: int = 3) -> Tensor:
    return torch.randint(5, 97, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def _mask(side: str) -> Tensor:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :6], mask[1, :1] = 0, 0
    return mask.flip(1) if side == "right" else mask


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


Result = Callable[[Copy, Any], Tensor]


def _plain(copy: Copy, model: Any) -> Tensor:
    return copy.run(model, _ids(), use_cache=False).logits


def _padded(side: str) -> Result:
    def run(copy: Copy, model: Any) -> Tensor:
        mask = _mask(side)
        given = {"position_ids": _positions(mask)} if side == "left" and _has_positions(model) else {}
        return copy.run(model, _ids(), attention_mask=mask, use_cache=False, **given).logits[mask.bool()]

    return run


def _compiled(run: Result) -> Result:
    """The same with the model's calls compiled: Dynamo hides from the library what it looks at."""

    def compiled(copy: Copy, model: Any) -> Tensor:
        torch.compiler.reset()
        return run(copy, torch.compile(model, backend="eager", dynamic=False))

    return compiled


def _has_positions(model: Any) -> bool:
    return type(model).__name__ not in ("BertForMaskedLM",)


def _rows(side: str) -> Result:
    """Each row of `_padded` computed alone."""

    def run(copy: Copy, model: Any) -> Tensor:
        mask = _mask(side).bool()
        return torch.cat([copy.run(model, _ids()[i : i + 1, mask[i]], use_cache=False).logits[0] for i in range(3)])

    return run


def _first(length: int) -> Result:
    """The rows of `_rows`, up to this column of the batch."""

    def run(copy: Copy, model: Any) -> Tensor:
        mask = _mask("left")[:, :length].bool()
        return torch.cat(
            [copy.run(model, _ids()[i : i + 1, :length][:, mask[i]], use_cache=False).logits[0] for i in range(3)]
        )

    return run


def _apart(copy: Copy, model: Any) -> Tensor:
    return torch.cat([copy.run(model, part, use_cache=False).logits for part in _ids(1).split(LENGTHS, 1)], 1)


def _packed(lengths: bool) -> Result:
    def run(copy: Copy, model: Any) -> Tensor:
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        given: dict[str, Any] = {"position_ids": positions}
        if lengths:
            offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
            given |= {f"cu_seq_lens_{side}": offsets for side in "qk"}
            given |= {f"max_length_{side}": max(LENGTHS) for side in "qk"}
        return copy.run(model, _ids(1), use_cache=False, **given).logits

    return run


def _packed_continued(copy: Copy, model: Any) -> Tensor:
    """A cache of packed sequences goes on: nothing says which of them, so that there is no right result."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    output = copy.run(model, _ids(1), position_ids=positions, use_cache=True)
    copy.run(model, _ids(1)[:, :1], use_cache=True, **{copy.cache: copy.held(output)})
    return torch.full((1,), 1e9)


def _refused(copy: Copy, model: Any) -> Tensor:
    return torch.zeros(1)


def _cached(steps: tuple[int, ...], static: bool = False, padded: bool = False) -> Result:
    def run(copy: Copy, model: Any) -> Tensor:
        cache, begin, parts = (_static(copy, model) if static else None), 0, []
        mask = _mask("left")[:, : sum(steps)]
        for step in steps:
            end = begin + step
            given: dict[str, Any] = {"use_cache": True}
            if cache is not None:
                given[copy.cache] = cache
            if padded:
                given |= {"attention_mask": mask[:, :end], "position_ids": _positions(mask)[:, begin:end]}
            if static and _takes(model, copy.name("cache_position")):
                given["cache_position"] = torch.arange(begin, end)
            output = copy.run(model, _ids()[:, begin:end], **given)
            cache, begin = copy.held(output), end
            parts.append(output.logits)
        found = torch.cat(parts, 1)
        return found[mask.bool()] if padded else found

    return run


def _takes(model: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters


def _static(copy: Copy, model: Any) -> Any:
    import inspect

    from transformers import StaticCache

    takes = inspect.signature(StaticCache.__init__).parameters
    given = {"max_batch_size": 3, "device": torch.device("cpu"), "dtype": torch.float32}
    given = {name: value for name, value in given.items() if name in takes}
    return StaticCache(config=model.config, **copy.named(max_cache_len=LENGTH + 6), **given)


def _generated(copy: Copy, model: Any) -> Tensor:
    given = copy.named(input_ids=_ids(), attention_mask=_mask("left"))
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(**given, **greedy, return_dict_in_generate=True, output_logits=True)
    return torch.stack(list(output.logits), 1)


def _gradients(copy: Copy, model: Any) -> Tensor:
    mask = _mask("right")
    model.zero_grad()
    with torch.enable_grad():
        logits = copy.run(model, _ids(), attention_mask=mask, use_cache=False).logits
        logits[mask.bool()].square().sum().backward()
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def _translated(copy: Copy, model: Any) -> Tensor:
    given = copy.named(attention_mask=_mask("right"), decoder_input_ids=_ids()[:, :9])
    return copy.run(model, _ids(), use_cache=False, **given).logits


#: By name: what is run under the attention name, and what eager attention computes on the unchanged copy.
_DECODER: dict[str, tuple[Result, Result]] = {
    "plain": (_plain, _plain),
    "padded_left": (_padded("left"), _rows("left")),
    "padded_right": (_padded("right"), _rows("right")),
    "packed": (_packed(False), _apart),
    "packed_lengths": (_packed(True), _apart),
    "packed_continued": (_packed_continued, _refused),
    "cached": (_cached((6, 5, 1, 1, 1)), _plain),
    "cached_padded": (_cached((8, 4, 1, 1), padded=True), _rows("left")),
    "static_padded": (_cached((8, 4, 1, 1), static=True, padded=True), _rows("left")),
    "static_chunks": (_cached((9, 5), static=True), _plain),
    "generated": (_generated, _generated),
    "gradients": (_gradients, _gradients),
}
_COMPILED = {
    "compiled_padded": (_compiled(_padded("left")), _rows("left")),
    "compiled_lengths": (_compiled(_packed(True)), _apart),
    "compiled_static": (_compiled(_cached((9, 1, 1), static=True, padded=True)), _first(11)),
    "compiled_bare": (_compiled(_cached((3, 1, 10), static=True)), _plain),  # without a mask
}
_SOME = ("plain", "padded_left", "padded_right", "packed", "cached", "generated", "gradients")
SCENARIOS: dict[str, dict[str, tuple[Result, Result]]] = {
    **dict.fromkeys(("llama", "gemma2", "gpt2"), _DECODER),
    "mistral": {**_DECODER, **_COMPILED},
    "falcon_h1": {name: _DECODER[name] for name in _SOME},
    "bert": {
        name: _DECODER[name] for name in ("padded_right", "gradients")
    } | {"plain": (lambda c, m: c.run(m, _ids()).logits,) * 2},
    "t5": {"translated": (_translated, _translated), "generated": (_generated, _generated)},
}  # fmt: skip


def _distance(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-6))
    return difference if difference == difference else float("inf")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def write(copy: Copy, path: str) -> dict[str, Any]:
    """Write what eager attention computes here."""
    expected = {}
    with torch.no_grad():
        for model_type, scenarios in SCENARIOS.items():
            model = copy.model(model_type, "eager")
            expected[model_type] = {name: right(copy, model) for name, (_, right) in scenarios.items()}
            expected[model_type]["weights"] = model.state_dict()
    torch.save(expected, path)
    ours = ("transformers", "kernel_compat", "__main__")
    return {"modules": [name for name in sys.modules if name.partition(".")[0] not in ours]}


def compare(copy: Copy, path: str) -> dict[str, str]:
    """By model and scenario: ``right``, ``wrong`` with the distance, or the error."""
    results: dict[str, str] = {}
    for model_type, expected in torch.load(path, weights_only=False).items():
        try:
            model = copy.model(model_type, NAME)
            model.load_state_dict(expected.pop("weights"))
        except Exception as error:
            results[f"{model_type} load"] = _short(error)
            continue
        for name, (run, _) in SCENARIOS[model_type].items():
            try:
                with torch.no_grad():
                    far = _distance(run(copy, model), expected[name])
                results[f"{model_type} {name}"] = "right" if far <= TOLERANCE else f"wrong by {far:.1e}"
            except Exception as error:
                results[f"{model_type} {name}"] = _short(error)
    return results


def works(names: dict[str, str]) -> str:
    """Why eager attention doesn't work here without padding and caches; empty if it does, whatever it computes."""
    try:
        copy = Copy(names)
        with torch.no_grad():
            for model_type in ("llama", "mistral", "gpt2"):
                _plain(copy, copy.model(model_type, "eager"))
    except Exception as error:
        return _short(error)
    return ""


def said_by_install() -> Iterator[str]:
    """What `install()` and `status()` say is wrong."""
    import kernel_compat

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel_compat.install()
    for one in caught:
        if "kernel_compat" in str(one.category) or "kernel_compat" in one.filename or one.filename == __file__:
            yield f"install warns: {' '.join(str(one.message).split())[:200]}"
    report = kernel_compat.status()
    if not report.ok:
        failed = [f"{shim.name}: {shim.reason}"[:200] for shim in report.shims if shim.state == "failed"]
        yield f"status: {'; '.join(failed) or 'not ok'}"


def said_by_check() -> Iterator[str]:
    """What `kernel-compat check` says is wrong."""
    from kernel_compat.diagnostics import numerics

    report = numerics.run([NAME])
    for name in report.names:
        bad = [f"{one.case} {one.verdict}" for one in name.cases if one.verdict not in ("right", "skipped")]
        if bad:
            yield f"check: {', '.join(bad)[:200]}"
    if not report.ok:
        yield "check: not ok"


def said_by_prove(model_types: list[str]) -> Iterator[str]:
    """What `kernel-compat prove` says is wrong."""
    from kernel_compat import cli

    for model_type in model_types:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = cli.main(["prove", model_type, "--workers", "1", "--timeout", "120"])
        if code:
            lines = output.getvalue().splitlines()
            bad = [line.strip() for line in lines if any(f" {word}" in line for word in ("wrong", "crashed", "lost"))]
            yield f"prove {model_type}: {'; '.join(bad)[:300] or lines[:1]}"


def find(request: dict[str, Any]) -> dict[str, Any]:
    """What is found on a copy: what says that something is wrong, and the results. As little as decides is run."""
    import kernel_compat

    if invalid := works(request["names"]):
        return {"invalid": invalid}
    red: list[str] = []
    try:
        red += said_by_install()
    except Exception as error:
        return {"red": [f"install raises {_short(error)}"], "results": {}}
    if red := [text for text in red if text not in request["usual"]]:
        return {"red": red, "results": {}}
    results = compare(Copy(request["names"]), request["expected"])
    wrong = [key for key, text in results.items() if text.startswith("wrong") and key not in request["ignored"]]
    if wrong:
        red += said_by_check()
    if wrong and not red:
        first = list(dict.fromkeys(key.split()[0] for key in wrong))
        for model_type in [*first, *(one for one in MODELS if one not in first)]:
            red += said_by_prove([model_type])
            if red:
                break
    kernel_compat.uninstall()
    return {"red": red, "results": results}


def _work(request: dict[str, Any]) -> None:
    sys.path.insert(0, request["path"])
    sys.dont_write_bytecode = not request.get("write")
    signal.alarm(SECONDS)
    warnings.simplefilter("ignore")
    try:
        found = write(Copy({}), request["expected"]) if request.get("write") else find(request)
    except BaseException as error:  # the mutation may break anything
        found = {"red": [f"{_short(error)} {traceback.extract_tb(error.__traceback__)[-1]}"], "results": {}}
    with open(request["found"], "w") as file:
        json.dump(found, file)


def _import(modules: Iterable[str]) -> None:
    """Import what transformers imports of other projects, once for all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    assert not any(name.partition(".")[0] in ("transformers", "kernel_compat") for name in sys.modules)


def main() -> None:
    """Answer requests, each in a forked process."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            with open(request["found"] + ".log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            _work(request)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if request.get("write"):
            _import(json.loads(Path(request["found"]).read_text()).get("modules", ()))
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
