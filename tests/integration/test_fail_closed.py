"""A protection that fails to apply refuses the calls it protects; a wrapper that changes nothing changes nothing."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from tiny import SHAPE, TRANSFORMERS, VOCAB

import kernel_compat
from kernel_compat import UnprotectedError, UnprotectedWarning
from kernel_compat.attention import mask_function as mask_functions
from kernel_compat.attention.roles import CACHE
from kernel_compat.environment import Environment
from kernel_compat.patching.seam import Read, Seam
from kernel_compat.patching.shim import Shim, discover

NAME = "fail_closed_flash"
IDS = torch.arange(12).reshape(1, 12) % VOCAB
POSITIONS = torch.tensor([[*range(5), *range(7)]])


def protecting() -> list[tuple[Shim, Seam]]:
    """The seams of transformers here whose shims protect calls, one by one."""
    environment = Environment.detect()
    needed = [one for one in discover()[0] if one.distribution == "transformers" and one.protects]
    needed = [shim for shim in needed if shim.not_needed(environment) is None]
    return [(shim, seam) for shim in needed for seam in shim.seams_for(environment.packages["transformers"])]


FUNCTIONS = [(shim, seam) for shim, seam in protecting() if not isinstance(seam, Read) or seam.roles]
SEAMS = [(shim, seam) for shim, seam in FUNCTIONS if not isinstance(seam, Read)]


#: The shims that protect other calls than those of a model with attention by the library's own function.
ELSEWHERE = {
    *(
        "gradient_checkpointing",
        "tf5_batching_streams",
        "tf5_decode_fast_path",
        "tf5_batching_offsets",
        "tf4_54_generate",
    ),
    *("tf5_flash_forward", "tf4_flash_forward", "tf4_54_flash_forward", "tf4_loader", "tf4_54_loader"),
}


def named(pair: tuple[Shim, Seam]) -> str:
    return f"{pair[0].name}-{pair[1].attribute}"


@contextmanager
def wrapped(seam: Seam, wrapper_of: Callable[[Any], Any]) -> Iterator[None]:
    """Other code's wrapper at a seam."""
    owner: Any = importlib.import_module(seam.module)
    *parents, name = seam.attribute.split(".")
    for part in parents:
        owner = getattr(owner, part)
    own = name in vars(owner)
    before = vars(owner).get(name, getattr(owner, name))
    kind = type(before) if isinstance(before, (classmethod, staticmethod)) else None
    wrapper = wrapper_of(before.__func__ if kind else before)
    setattr(owner, name, kind(wrapper) if kind else wrapper)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def passing_on(original: Any) -> Any:
    def anything(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result

    return anything


def hiding(original: Any) -> Any:
    def hidden(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        return original(*args, **kwargs)

    return hidden


def renaming(original: Any) -> Any:
    """What a release does that renames the first role, or an argument that isn't the object itself."""

    def other(*renamed: Any, renamed_too: Any = None, **more: Any) -> Any:
        return original(*renamed, **more)

    return other


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninstalls before `monkeypatch` takes back what the library was installed on."""
    kernel_compat.uninstall()
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    yield
    left = kernel_compat.uninstall().left_alone
    kernel_compat.unregister_attention(NAME)
    assert not left  # tests after this one would find them


def model(attention: str = NAME) -> Any:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, attn_implementation=attention))
    return made.eval()


def packed(made: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("pair", FUNCTIONS, ids=named)
def test_a_wrapper_that_passes_everything_on_changes_nothing(pair: tuple[Shim, Seam]) -> None:
    shim, seam = pair
    with wrapped(seam, passing_on), warnings.catch_warnings():
        warnings.simplefilter("error", UnprotectedWarning)
        report = kernel_compat.install(unproven="allow")
        assert report[shim.name].state == "applied"
        assert report.ok
        ours = packed(model())
        kernel_compat.uninstall()
    alone = torch.cat([model("eager")(input_ids=part).logits for part in IDS.split([5, 7], 1)], 1)
    assert torch.allclose(ours, alone, atol=1e-5)


@pytest.mark.parametrize("pair", FUNCTIONS, ids=named)
def test_a_failed_protection_refuses(pair: tuple[Shim, Seam]) -> None:
    """Reads and seams that other code has changed: each is a warning, and an error where its calls are made."""
    shim, seam = pair
    with wrapped(seam, hiding if seam.passes_on else renaming):
        with pytest.warns(UnprotectedWarning, match=f"{shim.name} is not applied: .*{seam.name}"):
            report = kernel_compat.install(unproven="allow")
        assert not report.ok
        assert report[shim.name].protects == shim.protects
        if shim.name in ELSEWHERE:
            packed(model())
        else:
            with pytest.raises(UnprotectedError, match=shim.name):
                packed(model())
        eager = packed(model("eager"))
        assert eager.isfinite().all()
        with pytest.warns(UnprotectedWarning):
            assert not kernel_compat.install(unproven="allow", broken="allow").ok
        if not isinstance(seam, Read) and shim.name == "model_forward":
            packed(model())  # as the user wants it
    report = kernel_compat.install(unproven="allow")
    assert report.ok
    assert packed(model()).isfinite().all()


def test_a_failed_protection_of_adapters_refuses() -> None:
    peft = pytest.importorskip("peft")
    (shim,) = [one for one in discover()[0] if one.name == "peft_forward"]
    if shim.not_needed(Environment.detect(["peft"])):
        pytest.skip(f"peft {peft.__version__} calls models as everyone does")
    with wrapped(shim.seams[0], renaming):
        with pytest.warns(UnprotectedWarning, match="peft_forward is not applied"):
            kernel_compat.install(unproven="allow")
        lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        with pytest.raises(UnprotectedError, match="adapters: packed sequences"):
            packed(peft.get_peft_model(model(), lora))
        assert packed(peft.get_peft_model(model("eager"), lora)).isfinite().all()
        assert packed(model()).isfinite().all()


def test_a_block_that_allows_broken_shims_ends() -> None:
    """The installation around it refuses again."""
    (seam,) = [seam for shim, seam in SEAMS if shim.name == "model_forward"]
    with wrapped(seam, hiding):
        with pytest.warns(UnprotectedWarning):
            kernel_compat.install(unproven="allow")
        with (
            pytest.warns(UnprotectedWarning),
            kernel_compat.installed(unproven="allow", broken="allow"),
        ):
            packed(model())
        with pytest.raises(UnprotectedError):
            packed(model())


def test_functools_wraps_does_not_hide_a_change() -> None:
    """`__wrapped__` gives the signature of the original, whatever the wrapper does."""
    (seam,) = [seam for shim, seam in SEAMS if shim.name == "model_forward"]

    def dropping(original: Any) -> Any:
        @functools.wraps(original)
        def dropped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **{**kwargs, "position_ids": None})

        return dropped

    with wrapped(seam, dropping), pytest.warns(UnprotectedWarning, match="dropped .*isn't known to pass"):
        assert not kernel_compat.install(unproven="allow").ok


def test_a_forward_that_is_overwritten_after_the_installation() -> None:
    """The arguments of the forward in progress are no longer seen: packed sequences would be attended to as one."""
    kernel_compat.install(unproven="allow")
    made = model()
    packed(made)
    base: Any = transformers.PreTrainedModel
    ours = vars(base)["__call__"]
    base.__call__ = torch.nn.Module.__call__
    try:
        with pytest.raises(UnprotectedError, match="model_forward"):
            packed(made)
        base.__call__ = passing_on(ours)
        packed(made)
    finally:
        base.__call__ = ours


@pytest.mark.parametrize(
    ("part", "kind", "attribute"), [("llama", "LlamaAttention", "is_causal"), ("gpt_oss", "GptOssAttention", "sinks")]
)
def test_a_layer_that_sets_another_attribute(
    part: str, kind: str, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer doesn't pass to its attention is read from it, under a name that a release may change."""
    modeling = importlib.import_module(f"transformers.models.{part}.modeling_{part}")
    layer = getattr(modeling, kind)
    source = inspect.getsource(modeling).replace(f"self.{attribute} = ", f"self.renamed_{attribute} = ")
    edited: dict[str, Any] = {**vars(modeling)}
    exec(compile(source, inspect.getfile(layer), "exec", dont_inherit=True), edited)
    made = vars(edited[kind])["__init__"]
    cell = [c for c in made.__closure__ if c.cell_contents is edited[kind]]
    cell[0].cell_contents = layer  # of its super()
    monkeypatch.setattr(layer, "__init__", made)
    with pytest.warns(UnprotectedWarning, match=f"reads_layers.*{kind}.{attribute}"):
        report = kernel_compat.install(unproven="allow")
    assert [shim.name for shim in report.shims if shim.state == "failed"] == ["reads_layers"]
    monkeypatch.undo()
    with pytest.raises(UnprotectedError, match=f"{kind}.{attribute}"):
        packed(model())


def plainly(init: Any) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.tagged = True

    return wrapper


def by_position(init: Any) -> Any:
    return lambda self, config, layer_idx=None: init(self, config, layer_idx)


@pytest.mark.parametrize("wrap", [plainly, by_position, functools.partialmethod, lambda init: plainly(plainly(init))])
def test_layers_whose_init_other_code_has_wrapped(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = importlib.import_module("transformers.models.llama.modeling_llama").LlamaAttention
    monkeypatch.setattr(layer, "__init__", wrap(layer.__init__))
    kernel_compat.install(unproven="allow")
    assert packed(model()).isfinite().all()


def test_an_argument_of_a_layer_that_nothing_is_known_of() -> None:
    kernel_compat.install(unproven="allow")
    made = model()
    attend = kernel_compat.attention_function(NAME)
    layer = made.model.layers[0].self_attn
    states = torch.randn(1, 2, 4, 16)
    attend(layer, states, states, states, None, scaling=0.25)
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="'window_size' of a layer's attention"):
        attend(layer, states, states, states, None, scaling=0.25, window_size=2)
    made(input_ids=IDS, of_my_framework=1)  # which the model passes on
    # A collator's numbers of packed sequences, for mixers. Sentence Transformers calls `forward`, which tells no arguments.
    made.forward(input_ids=IDS, seq_idx=torch.zeros(1, 12, dtype=torch.int32))


@pytest.mark.parametrize(
    ("argument", "attribute", "value"),
    [("softcap", "attn_logit_softcapping", 5.0), ("s_aux", "sinks", torch.ones(2)), ("scaling", "scaling", 0.5)],
)
def test_a_layer_that_does_not_pass_what_it_has(argument: str, attribute: str, value: Any) -> None:
    """Eager attention would leave it out alike."""
    kernel_compat.install(unproven="allow")
    attend = kernel_compat.attention_function(NAME)
    layer = model().model.layers[0].self_attn
    states = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    attend(layer, states, states, states, None)  # its scale is that of the head dimension
    without = attend(layer, states, states, states, None, **{argument: None})
    setattr(layer, attribute, value)
    with pytest.raises(ValueError, match=f"'{attribute}', but passes no '{argument}'"):
        attend(layer, states, states, states, None)
    torch.testing.assert_close(attend(layer, states, states, states, None, **{argument: None}), without)
    assert not torch.equal(attend(layer, states, states, states, None, **{argument: value})[0], without[0])


@pytest.mark.parametrize("window", [3, 5])
def test_a_layer_with_another_window_than_its_mask(window: int) -> None:
    """Eager attention would go by the mask, upstream's flash attention by the layer."""
    kernel_compat.install(unproven="allow")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SHAPE, head_dim=16, sliding_window=4, attn_logit_softcapping=None, attn_implementation=NAME
    )
    made = transformers.Gemma2ForCausalLM(config).eval()
    packed(made)
    for layer in made.model.layers:
        if layer.self_attn.sliding_window:
            layer.self_attn.sliding_window = window
    with pytest.raises(ValueError, match=f"a layer with a window of {window} keys got a mask with one of 4"):
        packed(made)
    with torch.no_grad():
        made(input_ids=IDS[:, :3], use_cache=False)  # which neither of the two hides anything from


def test_an_argument_of_a_mask_that_nothing_is_known_of() -> None:
    kernel_compat.install(unproven="allow")
    make = kernel_compat.mask_function(NAME)
    given = {"batch_size": 1, "q_length": 4, "cache_position": torch.arange(4), "kv_length": 4, "kv_offset": 0}
    make(**given, mask_function=None, attention_mask=None)
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="'padding_mask' of a mask function"):
        make(**given, mask_function=None, padding_mask=torch.zeros(1, 4))


def pattern_of(*edits: tuple[str, str]) -> Any:
    """Transformers' pattern of packed sequences with a window of 3, with its functions' source edited."""
    masks = importlib.import_module("transformers.masking_utils")
    own = dict(vars(masks))
    for name in ("and_masks", "causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"):
        source = inspect.getsource(own[name])
        for old, new in edits:
            source = source.replace(old, new)
        exec(source, own)
    packed = own["packed_sequence_mask_function"](torch.tensor([[0, 0, 0, 0, 1, 1]]))
    return own["and_masks"](own["sliding_window_overlay"](3), own["causal_mask_function"], packed)


def mask_of(pattern: Any) -> Any:
    sizes = {"batch_size": 1, "q_length": 6, "cache_position": torch.arange(6), "kv_length": 6, "kv_offset": 0}
    taken = inspect.signature(transformers.masking_utils.sdpa_mask).parameters
    sizes = {name: value for name, value in sizes.items() if name in taken}
    return kernel_compat.mask_function(NAME)(**sizes, mask_function=pattern, attention_mask=None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kv_idx <= q_idx", "kv_idx <= q_idx + 1"),
        ("kv_idx > q_idx - sliding_window", "kv_idx >= q_idx - sliding_window"),
        ("[batch_idx, q_idx] ==", "[batch_idx, q_idx] >="),
        ("result & mask", "result | mask"),
    ],
)
def test_a_mask_function_that_shows_other_keys_than_its_name_says(old: str, new: str) -> None:
    """The library goes by the name, eager attention by what the function does."""
    kernel_compat.install(unproven="allow")
    assert mask_of(pattern_of()).ndim == 2
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="It shows other keys than its name says"):
        mask_of(pattern_of((old, new)))


@pytest.mark.parametrize(
    "edits",
    [
        (("(sliding_window: int)", "(size: int)"), ("- sliding_window", "- size")),
        (
            ("    def and_mask(", "    more = ()\n\n    def and_mask("),
            ("in mask_functions:", "in mask_functions + more:"),
        ),
    ],
)
def test_a_mask_function_with_another_closure(edits: tuple[tuple[str, str], ...]) -> None:
    """Its mask is made in full."""
    kernel_compat.install(unproven="allow")
    q, k = torch.arange(6)[:, None], torch.arange(6)[None]
    assert torch.equal(mask_of(pattern_of(*edits))[0, 0], (k <= q) & (k > q - 3) & ((q < 4) == (k < 4)))


WINDOWED = "sliding_window_overlay(sliding_window), causal"
MADE = "= sliding_window_causal_mask_function(sliding_window)\n"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_other_code_that_chooses_the_kind_of_checkpoints(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ms-swift does for all callers."""
    checkpoints = torch.utils.checkpoint
    monkeypatch.setattr(
        checkpoints,
        "checkpoint",
        lambda *args, original=checkpoints.checkpoint, **kwargs: original(
            *args, **{**kwargs, "use_reentrant": use_reentrant}
        ),
    )
    assert kernel_compat.install(unproven="allow").ok


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kv_idx > q_idx - sliding_window", "kv_idx >= q_idx - sliding_window"),
        (WINDOWED, WINDOWED.replace("(sliding_window)", "(sliding_window + 1)")),
        (MADE, MADE.replace("(sliding_window)", "(sliding_window + 1)")),
        ("local_size=sliding_window,", "local_size=sliding_window - 1,"),
        (
            "    mask_factory_function = causal_mask_function\n",
            "    mask_factory_function = and_masks(causal_mask_function, sliding_window_overlay(2))\n",
        ),
        ("local_size=chunk_size,", "local_size=chunk_size + 1,"),
        pytest.param(
            "use_vmap = True",
            "use_vmap = False",
            marks=pytest.mark.skipif(TRANSFORMERS.release < (5, 0), reason="says nothing of a model's own pattern"),
        ),
    ],
    ids=["pattern", "window", "window of a mask", "size", "pattern of a mask", "size of chunks", "own pattern"],
)
def test_a_compiled_model_takes_no_name_for_granted(
    before: str, after: str, fullgraph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo hides what mask functions enclose, so that they can't be tried within a graph."""
    masks = importlib.import_module("transformers.masking_utils")
    modeling = importlib.import_module("transformers.models.mistral.modeling_mistral")
    with kernel_compat.installed(unproven="allow"):
        pass  # what it imports would keep the edited functions
    source = inspect.getsource(masks)
    assert before in source
    makers = [name for name, value in vars(modeling).items() if vars(masks).get(name) is value]
    for module, names in ((masks, [*vars(masks)]), (modeling, makers)):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    exec(compile(source.replace(before, after), str(masks.__file__), "exec", dont_inherit=True), vars(masks))
    vars(modeling).update({name: getattr(masks, name) for name in makers})
    again = mask_functions.constant(mask_functions._misleads.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(mask_functions, "_misleads", again)
    kernel_compat.install(unproven="allow")
    made = {}
    for attention in ("eager", NAME):
        torch.manual_seed(0)
        config = transformers.MistralConfig(**SHAPE, sliding_window=4, attn_implementation=attention)
        made[attention] = transformers.MistralForCausalLM(config).eval()
    compiled = torch.compile(made[NAME], backend="eager", fullgraph=fullgraph)
    torch._dynamo.reset()
    given: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "use_cache": False}
    refusal = ""
    try:
        found = compiled(IDS, **given).logits
    except Exception as error:  # Dynamo's
        refusal = str(error)
    if refusal:
        words = "It shows other keys than its name says|raise _misleading|nothing says which of them is right"
        assert re.search(words, refusal)  # the second is what torch 2.11 says of a whole graph
    else:  # torch 2.15 goes on without a graph
        assert not fullgraph
        torch.testing.assert_close(found, made["eager"](IDS, **given).logits)


def test_mask_functions_that_are_a_list_or_an_object() -> None:
    kernel_compat.install(unproven="allow")
    listed = ("    def and_mask(", "    mask_functions = list(mask_functions)\n\n    def and_mask(")
    assert mask_of(pattern_of(listed)).ndim == 2

    class Causal:
        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return k <= q

    assert torch.equal(mask_of(Causal())[0, 0], torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_bool_mask_that_says_what_is_hidden() -> None:
    kernel_compat.install(unproven="allow")
    attend = kernel_compat.attention_function(NAME)
    layer = model().model.layers[0].self_attn
    states = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    expected = attend(layer, states, states, states, visible, scaling=0.25)[0]
    torch.testing.assert_close(attend(layer, states, states, states, None, scaling=0.25)[0], expected)
    with pytest.raises(ValueError, match="whether its True means hidden"):
        attend(layer, states, states, states, ~visible, scaling=0.25)
    prefix = visible | (torch.arange(4) < 2)
    attend(layer, states, states, states, prefix, scaling=0.25)


def test_the_cache_has_a_known_name() -> None:
    assert CACHE.spelled(inspect.signature(model("eager").forward).parameters)
