"""Names of transformers on which a right number depends are spelled in roles.py alone, and a role gives the spelling of a forward."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernel_compat
import kernel_compat_ops
import kernel_compat_prove
import kernel_compat_run
import kernel_compat_shims
from kernel_compat.attention import roles
from kernel_compat.attention.roles import CACHE, LENGTHS, MASK, POSITIONS, SINKS, Role

LIBRARY, OPS, PROVE, RUN, SHIMS = (
    Path(inspect.getfile(package)).parent
    for package in (kernel_compat, kernel_compat_ops, kernel_compat_prove, kernel_compat_run, kernel_compat_shims)
)

#: But for words that have other meanings in most places: the last two are features of kernels.
NAMES = {spelling for role in vars(roles).values() if isinstance(role, Role) for spelling in role.spellings} - {
    *("cache", "state", "softcap", "sinks"),
}
#: Names that the library's own objects have, too: as attributes and keywords these may be meant.
OWN = {"cache_position", "head_dim", "is_causal", "is_encoder_decoder", "labels", "layer_idx", "layer_types"} | {
    *("local_window", "position_bias", "scaling", "seq_idx", "sliding_window"),
}

#: Files and folders that spell some of the names, with the reason.
ARGUMENTS, RECOGNISED, SIZES, STAND_IN = (
    "also arguments of functions of other projects, or of the library's own",
    "a function is recognised by its parameters; one with others isn't replaced",
    "the sizes of tiny models, by the names of configs",
    "a stand-in for a layer",
)
EXEMPT = {
    LIBRARY / "kernels": ("block_table is_causal s_aux", ARGUMENTS),
    LIBRARY / "diagnostics" / "numerics.py": ("_attn_implementation num_key_value_groups", STAND_IN),
    OPS / "losses" / "causal.py": ("labels num_items_in_batch shift_labels", ARGUMENTS),
    OPS / "recognisers" / "balancing.py": ("attention_mask", RECOGNISED),
    OPS / "recognisers" / "rotary.py": ("layer_types position_ids", RECOGNISED),
    PROVE / "recipes.py": ("layer_types", SIZES),
    PROVE / "tiny.py": (
        "head_dim layer_types max_position_embeddings qk_head_dim sliding_window use_sliding_window",
        SIZES,
    ),
    SHIMS / "torch2_11.py": ("is_causal", ARGUMENTS),
}


def spelled(tree: ast.AST) -> Iterator[str]:
    """The names that code spells as a string, a keyword of a call or an attribute; parameters and what a seam declares aren't."""
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) in ("Seam", "Read"):
        return
    found = {ast.Constant: "value", ast.keyword: "arg", ast.Attribute: "attr"}.get(type(tree))
    if found is not None and (name := getattr(tree, found)) in (NAMES if found == "value" else NAMES - OWN):
        yield f"{getattr(tree, 'lineno', '?')}: {name}"
    for child in ast.iter_child_nodes(tree):
        yield from spelled(child)


def exempt(path: Path) -> set[str]:
    return {name for place, (names, _) in EXEMPT.items() if place in (path, *path.parents) for name in names.split()}


@pytest.mark.parametrize("root", [LIBRARY, OPS, PROVE, RUN, SHIMS], ids=lambda root: root.name)
def test_nothing_else_spells_the_names(root: Path) -> None:
    found = []
    for path in sorted(root.rglob("*.py")):
        if path != Path(roles.__file__):
            lines = spelled(ast.parse(path.read_text(encoding="utf-8")))
            found += [f"{path.relative_to(root)}:{line}" for line in lines if line.split()[-1] not in exempt(path)]
    assert not found


@pytest.mark.parametrize("place", EXEMPT, ids=lambda place: place.name)
def test_no_exemption_is_left_over(place: Path) -> None:
    files = [place] if place.is_file() else place.rglob("*.py")
    lines = [line for path in files for line in spelled(ast.parse(path.read_text(encoding="utf-8")))]
    assert {line.split()[-1] for line in lines} == {*EXEMPT[place][0].split()}


@pytest.mark.parametrize(
    "code",
    [
        "mask = arguments.get('attention_mask')",
        "known['position_ids'] = positions",
        "if 'past_key_values' in names: pass",
        "FIELDS = ('cu_seq_lens_q', 'x')",
        "def f():\n    return model(inputs_embeds=x)",
        "outputs.past_key_values",
        "match given:\n    case {'use_cache': value}: pass",
        "Seam('module:function', ('self',)).of(max_length_k=1)",
        "window = getattr(module, 'sliding_window', None)",
        "module.config._attn_implementation",
    ],
)
def test_a_planted_name_is_found(code: str) -> None:
    assert len(list(spelled(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "def f(attention_mask, *, position_ids=None): '''Of attention_mask.'''; return attention_mask",
        "raise ValueError(f'pass position_ids of {shape}')",
        "Seam('module:function', ('self', 'input_ids', *('attention_mask',)))",
        "cache = state.get('cache')",
        "AttentionCall(sliding_window=call.sliding_window)",
    ],
)
def test_declarations_and_sentences_are_no_spelling(code: str) -> None:
    assert not list(spelled(ast.parse(code)))


def test_a_role_is_spelled_as_a_forward_spells_it() -> None:
    newest, old = CACHE.spellings
    assert (CACHE.named([old, "x"]), CACHE.named([old, newest]), CACHE.named(["x"])) == (old, newest, newest)
    assert (CACHE.spelled({old: 1}), CACHE.spelled({"x": 1})) == (old, None)


def test_attention_reads_every_spelling() -> None:
    """What is known of an attention function's arguments isn't refused: it must be read."""
    from kernel_compat.attention.forward import attention_forward
    from kernel_compat.kernels import known_kernels

    takes = inspect.signature(attention_forward(known_kernels()["flash_attention_reference"], "x")).parameters
    passed = (MASK, POSITIONS, SINKS, *LENGTHS, roles.SCALE, roles.SOFTCAP, roles.CAUSALITY)
    assert {spelling for role in passed for spelling in role.spellings} <= {*takes}
