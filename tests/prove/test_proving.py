"""The proof itself: correct models are equal, and kernels that are wrong, refuse or crash are found."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS

import kernel_compat
from kernel_compat import cli
from kernel_compat.attention.roles import MASK, Role
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.kernels import Functions, Kernel, known_kernels
from kernel_compat.kernels.options import Lengths, Options
from kernel_compat.proofs import table
from kernel_compat_prove import QUICK, Proof, cases, proof, prove_config, prove_type, sweep
from kernel_compat_prove.architectures import model_types
from kernel_compat_prove.subject import CountedKernel

NAME = "broken_flash"


@pytest.fixture
def broken() -> Iterator[Callable[[Callable[..., Any]], str]]:
    """Register names whose kernels wrap every call of the reference kernel in a change."""

    def register(change: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> str:
        original = known_kernels()["flash_attention_reference"]
        functions = original.load()
        kernel = Kernel("broken", original.providers)

        def attend(q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None = None, mask: Any = None) -> Any:
            keywords = {**options._asdict(), **({} if lengths is None else lengths._asdict())}

            def call(**more: Any) -> Any:
                replaced = None if lengths is None else Lengths(**{f: {**keywords, **more}[f] for f in Lengths._fields})
                chosen = Options(**{f: {**keywords, **more}[f] for f in Options._fields})
                return functions.attend(q, k, v, chosen, replaced, mask)

            return change(call, keywords)

        kernel.preload(original.features, Functions(attend))
        kernel_compat.register_attention(NAME, kernel=kernel)
        return NAME

    yield register
    kernel_compat.unregister_attention(NAME)


def verdicts(found: Proof) -> dict[str, str]:
    return {outcome.case: outcome.verdict for outcome in found.outcomes}


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_right_model_is_equal(model_type: str) -> None:
    found = prove_type(model_type, QUICK)
    assert verdicts(found) == {case: "not applicable" if case == "cross_attention" else "equal" for case in QUICK}
    assert not kernel_compat.status().installed


def test_an_encoder_decoder_is_equal() -> None:
    found = prove_type("bart", ["plain", "padded_left", "cross_attention", "gradients"])
    whole = [outcome for outcome in found.outcomes if outcome.model == "BartForConditionalGeneration"]
    assert [outcome.verdict for outcome in whole] == ["equal"] * 4


@pytest.mark.parametrize(
    ("model_type", "case", "verdict"),
    [
        ("diffllama", "packed_lengths", "equal"),  # up to 4.57 its class for FlashAttention-2 takes no lengths
        ("hunyuan_vl", "image", "equal"),  # its image positions start from 0 in the middle of a text
        ("gemma4_unified", "packed_positions", "equal"),  # a 4D mask without images
        ("kosmos-2", "plain", "refused"),  # up to 4.57 neither a layer nor a mask says whether it is causal
        ("kosmos-2", "generate", "refused"),  # it calls that layer outside its model's forward
        ("recurrent_gemma", "padded_left", "equal"),  # upstream's recurrence runs over padding
        ("recurrent_gemma", "generate", "refused"),  # and keeps padding in the cache of a batch
        ("recurrent_gemma", "padded_right", "equal"),
        # These models have causal masks, but layers that say they are not causal.
        ("moonshine", "padded_right", "equal"),
        ("paligemma", "plain", "equal"),
        ("pegasus_x", "padded_right", "equal"),
        ("aimv2", "plain", "equal"),
        ("videoprism", "plain", "equal"),
    ],
)
def test_types_that_were_wrong(model_type: str, case: str, verdict: str) -> None:
    if model_type not in model_types():
        pytest.skip("newer")
    found = prove_type(model_type, [case])
    if found.outcomes[0].case == "load":
        pytest.skip(found.outcomes[0].reason)
    assert [outcome.verdict for outcome in found.outcomes] == [verdict], found


@pytest.mark.skipif("deepseek_v4" not in model_types(), reason="newer")
def test_deepseek_v4_is_refused() -> None:
    """It declares no flash attention, and attended to future tokens under registered names."""
    (outcome,) = prove_type("deepseek_v4", ["plain"]).outcomes
    assert (outcome.case, outcome.verdict) == ("load", "refused")
    assert "each query chooses its keys" in outcome.reason or "_supports_flash_attn" in outcome.reason


def test_a_config_is_proven_as_it_is() -> None:
    config = CAUSAL_LMS["qwen2_window"]()
    before = config.to_dict()
    found = prove_config(config, transformers.Qwen2ForCausalLM, QUICK)
    assert found.verdict == "equal"
    assert config.to_dict() == before


def test_dropout_that_is_in_no_config() -> None:
    """Upstream's token classifiers drop without a config value; separate sequences would draw other dropout masks than packed ones."""
    cases = ["gradients_packed", "checkpointing"]
    found = prove_config(CAUSAL_LMS["llama"](), transformers.LlamaForTokenClassification, cases)
    assert verdicts(found) == dict.fromkeys(cases, "equal")


def test_a_kernel_that_is_not_causal_is_wrong(broken: Any) -> None:
    name = broken(lambda call, kwargs: call(causal=False))
    found = prove_type("llama", ["plain"], attn_implementation=name)
    assert found.verdict == "wrong"
    assert found.outcomes[0].difference is not None
    assert found.outcomes[0].difference > 0.1


def test_a_kernel_whose_gradients_alone_are_wrong_is_wrong(broken: Any) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad / 2

    name = broken(lambda call, kwargs: Halved.apply(call()))
    found = verdicts(prove_type("llama", ["plain", "gradients"], attn_implementation=name))
    assert found == {"plain": "equal", "gradients": "wrong"}


def test_what_only_masks_of_any_kind_compute_is_proven_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window over padding between tokens is refused by every other kernel."""
    assert verdicts(prove_type("mistral", ["padded_holes"])) == {"padded_holes": "refused"}
    count = CountedKernel._count

    def off_with_masks(self: CountedKernel, function: Any) -> Any:
        counted = count(self, function)
        return lambda *a, **k: counted(*a, **k) / (1 if k.get("mask") is None else 2)

    monkeypatch.setattr(CountedKernel, "_count", off_with_masks)
    (found,) = prove_type("mistral", ["padded_holes"]).outcomes
    assert (found.verdict, found.reason) == ("wrong", "by a kernel with masks of any kind")


def test_crashes_differ_from_refusals(broken: Any) -> None:
    def crash(call: Any, kwargs: dict[str, Any]) -> Any:
        if "cu_seqlens_q" in kwargs:
            raise UnsupportedFeatureError("varlen", "broken", "Don't.")
        raise IndexError("out of range")

    name = broken(crash)
    found = prove_type("llama", ["plain", "packed_positions"], attn_implementation=name)
    assert verdicts(found) == {"plain": "crashed", "packed_positions": "refused"}
    assert "IndexError: out of range" in found.outcomes[0].reason
    assert "varlen" in found.outcomes[1].reason


def test_a_type_that_ends_its_process_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proof.prove_type

    def prove(name: str, *args: Any, **options: Any) -> Proof:
        return os._exit(3) if name == "gpt_neox" else real(name, *args, **options)

    monkeypatch.setattr(proof, "prove_type", prove)
    found = {one.model_type: one for one in sweep(["llama", "gpt_neox"], ["plain"], workers=2)}
    assert found["llama"].verdict == "equal"
    assert found["gpt_neox"].verdict == "crashed"
    assert "exit code 3" in found["gpt_neox"].outcomes[0].reason


def test_a_cache_under_an_unknown_name_is_no_reason_for_a_green_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in transformers 5.24, which renamed the argument: the cases for caches no longer run."""
    for role in ("CACHE", "LAYER_CACHE"):
        monkeypatch.setattr(cases, role, Role("cache", ("no_such_name",)))
    found = prove_config(CAUSAL_LMS["llama"](), transformers.LlamaForCausalLM, ["plain", "cached"])
    assert verdicts(found) == {"plain": "equal", "cached": "untested"}
    assert "no cache under a known name" in found.outcomes[1].reason
    ran = {"4.54": {"llama": {"LlamaForCausalLM": ["plain", "cached"]}}}
    monkeypatch.setattr(table, "cases_that_ran", lambda: ran)
    assert cli.main(["prove", "llama", "--case", "plain", "--case", "cached", "--workers", "1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM cached lost: it ran on 4.54, not here: its forward takes" in said
    assert "1 lost" in said


class RenamedMask(transformers.LlamaForCausalLM):
    """A model of a release that has renamed the mask."""

    def forward(self, input_ids: Any = None, padding_mask: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids, **{MASK.spellings[-1]: padding_mask}, position_ids=position_ids)


class PassesOn(transformers.LlamaForCausalLM):
    """A model that passes on what the models within it name."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("model_class", [RenamedMask, PassesOn, transformers.LlamaForCausalLM])
def test_a_renamed_argument_loses_no_case(model_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Role("mask", ("padding_mask", *MASK.spellings))
    for module in [module for module in sys.modules.values() if vars(module).get("MASK") is MASK]:
        if module.__name__ != __name__:
            monkeypatch.setattr(module, "MASK", both)
    ran = ["padded_left", "padded_right", "mask_bool", "mask_4d", "packed_mask", "gradients"]
    assert verdicts(prove_config(CAUSAL_LMS["llama"](), model_class, ran)) == dict.fromkeys(ran, "equal")


def test_unknown_types() -> None:
    with pytest.raises(ValueError, match="no_such_model"):
        prove_type("no_such_model")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proofs.json"
    assert cli.main(["prove", "llama", "--case", "plain", "--json", str(file), "--workers", "1"]) == 0
    assert "1 equal" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["summary"]["equal"] == 1
    assert document["proofs"][0]["outcomes"][0]["case"] == "plain"


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file for it, and nothing else."""
    assert cli.main(["prove", "llama", "--case", "plain", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["equal"] == 1


def test_the_command_proves_a_registered_name(broken: Any) -> None:
    name = broken(lambda call, kwargs: call(causal=False))
    assert cli.main(["prove", "llama", "--case", "plain", "--attn", name]) == 1


def test_a_folder(tmp_path: Path) -> None:
    config = CAUSAL_LMS["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert cli.main(["prove", str(tmp_path), "--case", "plain"]) == 0


CONFIG = """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine"
"""
AUTO = {"AutoConfig": "configuration_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no config.json"),
        ({"config.json": '{"model_type": '}, "can't be read: .*not a valid JSON"),
        ({"config.json": "[1, 2]"}, "can't be read: "),
        ({"config.json": '{"hidden_size": 3}'}, "can't be read: "),
        ({"config.json": '{"model_type": "no_such_type"}'}, "can't be read: .*no_such_type"),
        ({"configuration_mine.py": "raise RuntimeError('first\\nsecond')"}, "can't be read: RuntimeError: first$"),
        ({"configuration_mine.py": "raise SystemExit(0)"}, "can't be read: SystemExit: 0"),
        ({"configuration_mine.py": CONFIG, "modeling_mine.py": "1 / 0"}, "can't be read: ZeroDivisionError"),
    ],
)
def test_a_folder_that_can_not_be_read(
    files: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "configuration_mine.py" in files:
        files = {"modeling_mine.py": "", "config.json": json.dumps({"model_type": "mine", "auto_map": AUTO}), **files}
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    _fails(["prove", str(folder)], f"model {says}", capsys)


def _fails(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(says, said.err.strip().splitlines()[-1])
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_type"], "'no_such_type' is neither a model type"),
        (["llama", "--attn", "nope"], "'nope' is no attention name here"),
        (["llama", "--json", "FOLDER"], "can't be written: Is a directory"),
        (["llama", "--json", "FOLDER/no/file.json"], "can't be written: No such file"),
    ],
)
def test_arguments_are_refused_before_the_work(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kernel_compat_prove.sweep", lambda *_, **__: pytest.fail("the work began"))
    _fails(["prove", *(argument.replace("FOLDER", str(tmp_path)) for argument in arguments)], says, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.5], ids=["in the middle of the fork", "later"])
def test_ctrl_c_keeps_the_proofs_so_far(delay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = proof.prove_type

    def prove(name: str, *args: Any, **options: Any) -> Proof:
        if name == "opt":  # the last type
            time.sleep(delay)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(1)
        return real(name, *args, **options)

    monkeypatch.setattr(proof, "prove_type", prove)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
    file = tmp_path / "proofs.json"
    arguments = ["prove", "llama", "mistral", "opt", "--case", "plain", "--json", str(file), "--workers", "1"]
    try:
        assert cli.main(arguments) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    document = json.loads(file.read_text())
    assert [one["model_type"] for one in document["proofs"]] == ["llama", "mistral"]
    assert (document["interrupted"], document["ok"]) == (True, False)
    for process in multiprocessing.active_children():  # they would otherwise end with the command
        process.kill()
        process.join()


CANNED = """
import kernel_compat_prove as proving
from kernel_compat_prove import Outcome, Proof

def sweep(types, **options):
    (name,) = types
    one = {
        "gpt2": Outcome("GPT2", "plain", "wrong", 1.5),
        "opt": Outcome("OPT", "cached", "crashed", reason="IndexError: no"),
        "bert": Outcome("Bert", "load", "refused", reason="it has no flash attention"),
    }.get(name, Outcome("Llama", "plain", "equal"))
    return [Proof(name, "5.0.0", no_recipe="no inputs") if name == "clvp" else Proof(name, "5.0.0", (one,))]

proving.sweep = sweep
"""


@pytest.mark.slow
def test_the_suite_of_the_matrix(tmp_path: Path) -> None:
    (tmp_path / "canned.py").write_text(CANNED)
    chosen = ["llama", "gpt2", "opt", "bert", "clvp"]
    nodes = [f"tests/sweep/test_types.py::test_type[{name}]" for name in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "canned", "-p", "no:cacheprovider", "-rA", *nodes],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout
    for word, name in zip(("PASSED", "FAILED", "ERROR", "XFAIL"), chosen, strict=False):
        assert re.search(rf"{word} +tests/sweep/test_types.py::test_type\[{name}\]", said), said
    assert "GPT2 plain: off by 1.5" in said
    assert "OPT cached: IndexError: no" in said
    assert "no recipe: no inputs" in said
    assert (
        "proven: 5 tried, 1 equal, 1 refused, 1 wrong, 1 crashed, 0 lost, 0 untested, 0 not applicable, 1 no recipe"
        in said
    )
    assert done.returncode == 1
