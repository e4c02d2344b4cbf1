"""Changes of transformers, one at a time, such as a release may bring: a name renamed everywhere, or another behaviour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["MUTANTS", "Mutant"]

#: Files below the package's folder, by their path there, with the pattern and its replacement.
Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """A change of transformers.

    Attributes:
        name: the name of the change.
        edits: a pattern of paths, a pattern of text and its replacement each. All edits must change something, or the release
            doesn't have what is changed.
        spare: patterns whose text is restored after the edits: other projects' names.
        names: the new names of what callers pass and read, by the old ones.
    """

    name: str
    edits: tuple[Edit, ...]
    spare: tuple[Edit, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def apply(self, read: Callable[[], Iterable[tuple[str, str]]]) -> dict[str, str]:
        """The changed files by path; empty if this release lacks what is changed.

        Args:
            read: yields the path and the text of every file.
        """
        changed: dict[str, str] = {}
        done = [False] * len(self.edits)
        for path, text in read():
            new = text
            for number, (where, pattern, replacement) in enumerate(self.edits):
                if re.search(where, path):
                    new, count = re.subn(pattern, replacement, new)
                    done[number] = done[number] or bool(count)
            if new != text:
                for where, pattern, replacement in self.spare:
                    if re.search(where, path):
                        new = re.sub(pattern, replacement, new)
                changed[path] = new
        return changed if all(done) else {}


def _renamed(name: str, new: str, *spare: Edit, pattern: str = r"\b{}\b") -> Mutant:
    return Mutant(f"{name} is called {new}", (("", pattern.format(name), new),), spare, {name: new})


def _changed(name: str, *edits: Edit) -> Mutant:
    return Mutant(name, edits)


_MASKS, _CACHES, _LLAMA = r"^masking_utils\.py$", r"^cache_utils\.py$", r"^models/llama/modeling_llama\.py$"
_LIKE_LLAMA = r"^models/(llama|mistral|gemma2|falcon_h1)/modeling_"
#: torch's own argument.
_OF_TORCH = ("", r"(scaled_dot_product_attention\([^)]*?)causal_only=", r"\1is_causal=")
_OF_TORCH_LINES = (
    r"^integrations/sdpa_attention\.py$",
    r"(\n        )causal_only=causal_only,",
    r"\1is_causal=causal_only,",
)

#: What models, masks, caches and attention functions take on the way from a model's call to a kernel.
_ARGUMENTS = (
    _renamed("attention_mask", "token_mask"),
    _renamed("position_ids", "token_positions"),
    _renamed("past_key_values", "kv_cache"),
    Mutant(
        "cache is called kv_store",
        (
            (
                "^(models/|generation/|masking_utils|modeling_|cache_utils|integrations/)",
                r"(?<!import )(?<![/-])\bcache\b(?![/-]| import)",
                "kv_store",
            ),
        ),
        (("", r"functools\.kv_store|@kv_store", "functools.cache"),),
        {"cache": "kv_store"},
    ),
    _renamed("use_cache", "with_cache"),
    _renamed("cache_position", "cache_index"),
    _renamed("inputs_embeds", "input_states"),
    _renamed("input_ids", "token_ids"),
    _renamed("input_embeds", "input_states"),
    _renamed("cu_seq_lens_q", "cu_seqlens_q_"),
    _renamed("cu_seq_lens_k", "cu_seqlens_k_"),
    _renamed("max_length_q", "longest_q"),
    _renamed("max_length_k", "longest_k"),
    _renamed("sliding_window", "local_attention_window"),
    _renamed("softcap", "logit_softcap"),
    _renamed("scaling", "score_scale", ("", r"rope_score_scale", "rope_scaling")),
    _renamed("s_aux", "sink_logits"),
    _renamed("is_causal", "causal_only", _OF_TORCH, _OF_TORCH_LINES),
    _renamed("position_embeddings", "rotary"),
    _renamed("output_attentions", "return_attentions"),
    _renamed("hidden_states", "states"),
    _renamed("encoder_hidden_states", "encoder_states"),
    _renamed("encoder_attention_mask", "encoder_mask"),
    _renamed("decoder_input_ids", "target_ids"),
    _renamed("kv_length", "keys_length"),
    _renamed("q_length", "queries_length"),
    _renamed("kv_offset", "keys_offset"),
    _renamed("q_offset", "queries_offset"),
    _renamed("mask_function", "pattern_function"),
    _renamed("allow_is_causal_skip", "may_skip"),
    _renamed("local_size", "window_size_"),
    _renamed("use_vmap", "vectorised"),
    _renamed("layer_idx", "layer_number"),
    _renamed("position_bias", "score_bias"),
    _renamed("max_cache_len", "cache_length"),
    _renamed("key_states", "keys_"),
    _renamed("dropout_p", "drop"),
    _renamed("cache_params", "mixer_cache"),
)

#: Flags, attributes of configs and layers, methods of caches and functions that are read or called by name.
_NAMES = (
    _renamed("_supports_flash_attn", "_supports_flash"),
    _renamed("_supports_attention_backend", "_supports_attention_functions"),
    _renamed("_supports_sdpa", "_supports_torch_sdpa"),
    _renamed("_attn_implementation", "_attention_name"),
    _renamed("attn_implementation", "attention_name"),
    _renamed("num_key_value_groups", "kv_groups"),
    _renamed("layer_types", "kinds_of_layers"),
    _renamed("attn_logit_softcapping", "attention_softcap"),
    _renamed("num_key_value_heads", "num_kv_heads"),
    _renamed("get_seq_length", "cached_length"),
    _renamed("get_mask_sizes", "sizes_of_mask"),
    _renamed("get_query_offset", "offset_of_queries"),
    _renamed("is_sliding", "has_window"),
    _renamed("is_compileable", "can_compile"),
    _renamed("is_encoder_decoder", "encodes_and_decodes"),
    _renamed("causal_mask_function", "causal_pattern"),
    _renamed("sliding_window_overlay", "window_pattern"),
    _renamed("packed_sequence_mask_function", "same_sequence"),
    _renamed("packed_sequence_mask", "sequence_numbers"),
    _renamed("remap_positions_for_packed_sequence", "positions_by_sequence"),
    _renamed("and_mask", "both_masks"),
    _renamed("and_masks", "all_masks"),
    _renamed("find_packed_sequence_indices", "sequences_of_positions"),
    _renamed("_preprocess_mask_arguments", "_prepare_mask"),
    _renamed("create_causal_mask", "make_causal_mask"),
    _renamed("create_masks_for_generate", "make_masks_for_generate"),
    _renamed("ALL_ATTENTION_FUNCTIONS", "ATTENTION_FUNCTIONS"),
    _renamed("ALL_MASK_ATTENTION_FUNCTIONS", "MASK_FUNCTIONS"),
    _renamed("get_interface", "function_of"),
    _renamed("_flash_attention_forward", "_run_flash_attention"),
    _renamed("_check_and_adjust_attn_implementation", "_check_attention_name"),
    _renamed("_global_mapping", "_functions"),
    _renamed("GradientCheckpointingLayer", "CheckpointedLayer"),
    _renamed("sdpa_mask", "torch_mask"),
)

#: What is done otherwise.
_BEHAVIOURS = (
    _changed("llama's layers say that they aren't causal", (_LLAMA, r"self\.is_causal = True", "self.is_causal = False")),
    _changed("llama's layers don't say whether they are causal", (_LLAMA, r"\n\s*self\.is_causal = True", "")),
    _changed(
        "llama passes is_causal=False to its attention",
        (_LLAMA, r"(scaling=self\.scaling,\n)", r"\1            is_causal=False,\n"),
    ),
    _changed(
        "the models' layers say that they aren't causal",
        (_LIKE_LLAMA, r"self\.is_causal = (True|not .*)", "self.is_causal = False"),
    ),
    _changed("the attention gets no mask", (_LIKE_LLAMA, r"(value_states,\n\s*)attention_mask,", r"\1None,")),
    _changed(
        "the layers get no mask", (_LIKE_LLAMA, r"attention_mask=(causal_mask\b|causal_mask_mapping\[[^\]]*\])(\[[^\]]*\])?", "attention_mask=None")
    ),
    _changed("the attention gets no scale", (_LLAMA, r"scaling=self\.scaling,", "")),
    _changed("the layers get no position_ids", (_LIKE_LLAMA, r"\n\s*position_ids=position_ids,(?=\n\s*(past_key_values|cache)=)", "")),
    _changed("the layers get no more arguments", (_LLAMA, r"(use_cache=use_cache,\n(?:\s*\w+=\w+,\n)*)\s*\*\*kwargs,", r"\1")),
    _changed("mistral passes no window", ("^models/mistral/modeling_", r"sliding_window=getattr\(self\.config, \"sliding_window\", None\),", "")),
    _changed("mistral passes a window longer by one", ("^models/mistral/modeling_", r"sliding_window=getattr\(self\.config, \"sliding_window\", None\),", "sliding_window=self.config.sliding_window + 1,")),
    _changed("gemma2 passes no window", ("^models/gemma2/modeling_", r"\n\s*sliding_window=self\.sliding_window,", "")),
    _changed("gemma2 passes no softcap", ("^models/gemma2/modeling_", r"\n\s*softcap=self\.attn_logit_softcapping,", "")),
    _changed("gemma2 passes its softcap by another name", ("^models/gemma2/modeling_", r"\bsoftcap\b", "logits_softcap")),
    _changed("gemma2's layers swap windows and full attention", ("^models/gemma2/modeling_", r"== \"sliding_attention\" else None", '!= "sliding_attention" else None')),
    _changed("the queries get the heads of the keys repeated", (_LLAMA, r"(        attention_interface: Callable)", r"        key_states, value_states = (repeat_kv(x, self.num_key_value_groups) for x in (key_states, value_states))\n        groups, self.num_key_value_groups = self.num_key_value_groups, 1\n\1"), (_LLAMA, r"(        attn_output = attn_output\.reshape)", r"        self.num_key_value_groups = groups\n\1")),
    _changed(
        "the attention gets (batch, length, heads, dim)",
        (_LLAMA, r"(attention_interface\(\n\s*self,\n\s*)query_states,(\n\s*)key_states,(\n\s*)value_states,", r"\1query_states.transpose(1, 2),\2key_states.transpose(1, 2),\3value_states.transpose(1, 2),"),
        (_LLAMA, r"(\ndef eager_attention_forward\((?:.|\n)*?\):\n)", r"\1    query, key, value = (x.transpose(1, 2) for x in (query, key, value))\n"),
    ),
    _changed(
        "the attention returns (batch, heads, length, dim)",
        (_LLAMA, r"attn_output = attn_output\.transpose\(1, 2\)\.contiguous\(\)\n", "attn_output = attn_output\n"),
        (_LLAMA, r"attn_output\.reshape\(\*input_shape, -1\)", "attn_output.transpose(1, 2).reshape(*input_shape, -1)"),
    ),
    _changed("the attention gets its inputs by other names", (_LLAMA, r"(attention_interface\(\n\s*self,\n\s*)query_states,(\n\s*)key_states,(\n\s*)value_states,(\n\s*)attention_mask,", r"\1query=query_states,\2key=key_states,\3value=value_states,\4mask=attention_mask,"), (_LLAMA, r"(def eager_attention_forward\((?:.|\n)*?)attention_mask:", r"\1mask:"), (_LLAMA, r"(def eager_attention_forward(?:.|\n)*?if )attention_mask is not None:", r"\1mask is not None:"), (_LLAMA, r"(def eager_attention_forward(?:.|\n)*?mask is not None:\n(?:.*\n)?.*?)attention_mask", r"\1mask")),
    _changed("the attention gets the keys' padding by a new argument", (_LLAMA, r"(scaling=self\.scaling,\n)", r"\1            key_padding=attention_mask,\n"), (_LLAMA, r"(value_states,\n\s*)attention_mask,", r"\1None,"), (_LLAMA, r"(def eager_attention_forward\((?:.|\n)*?\):\n)", r"\1    attention_mask = kwargs['key_padding']\n")),
    _changed("the attention gets half the scale beside a new argument", (_LLAMA, r"scaling=self\.scaling,\n", "scaling=self.scaling / 2,\n            temperature=0.5,\n"), (_LLAMA, r"(def eager_attention_forward\((?:.|\n)*?\):\n)", r"\1    scaling = scaling / kwargs['temperature']\n")),
    # Masks.
    _changed("masks drop the padding", (_MASKS, r"attention_mask = attention_mask\.to\(device=.*\)", "attention_mask = None")),
    _changed("masks of eager attention drop the padding", (_MASKS, r"return local_padding_mask\b", "return None")),
    _changed("2D masks have the dtype of integers", (_MASKS, r"attention_mask = attention_mask\.to\(device=(.*?), dtype=torch\.bool\)", r"attention_mask = attention_mask.to(device=\1, dtype=torch.int64)")),
    _changed("2D masks are inverted", (_MASKS, r"(attention_mask = attention_mask\.to\(device=.*?, dtype=torch\.bool\))", r"\1.logical_not()"), (_MASKS, r"return padding_mask\[batch_idx, kv_idx\]", "return ~padding_mask[batch_idx, kv_idx]")),
    _changed("a query sees the key after it", (_MASKS, r"return kv_idx <= q_idx\b", "return kv_idx <= q_idx + 1")),
    _changed("a query doesn't see its own key", (_MASKS, r"return kv_idx <= q_idx\b", "return (kv_idx < q_idx) | (kv_idx == 0)")),
    _changed("a window is longer by one", (_MASKS, r"return kv_idx > q_idx - sliding_window", "return kv_idx >= q_idx - sliding_window")),
    _changed("a window is shorter by one", (_MASKS, r"return kv_idx > q_idx - sliding_window", "return kv_idx > q_idx - sliding_window + 1")),
    _changed("the window's size counts one less", (_MASKS, r"sliding_window = getattr\(config, \"sliding_window\", None\)", 'sliding_window = getattr(config, "sliding_window", 1) - 1')),
    _changed("masks of windows are plain causal ones", (_MASKS, r"sliding_window_causal_mask_function\(sliding_window\)(?=\n)", "causal_mask_function")),
    _changed("packed sequences aren't found", (_MASKS, r"(def find_packed_sequence_indices(?:.|\n)*?\"\"\"(?:.|\n)*?\"\"\"\n)", r"\1    return None\n")),
    _changed("packed sequences see each other", (_MASKS, r"return packed_sequence_mask\[batch_idx, q_idx\] == packed_sequence_mask\[batch_idx, kv_idx\]", "return packed_sequence_mask[batch_idx, q_idx] >= 0")),
    _changed("packed sequences are found beside a cache and a mask", (_MASKS, r"if position_ids is not None and attention_mask is None and (past_key_values|cache) is None:", r"if position_ids is not None and position_ids.shape[1] > 1:")),
    _changed("positions from 0 are numbered from 1 in masks", (_MASKS, r"(def create_causal_mask(?:.|\n)*?\"\"\"(?:.|\n)*?\"\"\"\n)", r"\1    position_ids = None if position_ids is None else position_ids * 2\n")),
    _changed("masks reckon with one key more", (_MASKS, r"(kv_length, kv_offset = (?:past_key_values|cache)\.get_mask_sizes\(.*\))", r"\1\n        kv_length, kv_offset = kv_length, kv_offset + 1")),
    _changed("masks are made for no name that isn't upstream's", (_MASKS, r"if config\._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS\._global_mapping:", 'if config._attn_implementation not in ("eager", "sdpa", "flash_attention_2", "flex_attention"):')),
    _changed("masks of unknown names are sdpa's", (_MASKS, r"mask_interface = ALL_MASK_ATTENTION_FUNCTIONS\[config\._attn_implementation\]", 'mask_interface = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation if config._attn_implementation == "eager" else "sdpa"]')),
    _changed("mask functions get a pattern of a new kind", (_MASKS, r"return and_masks\(sliding_window_overlay\(sliding_window\), causal_mask_function\)", "return lambda b, h, q, k: (k <= q) & (k > q - sliding_window)")),
    _changed("mask functions get causality by a flag", (_MASKS, r"mask_factory_function = causal_mask_function\n", "mask_factory_function = bidirectional_mask_function if config._attn_implementation != 'eager' else causal_mask_function\n")),
    # Caches.
    _changed("a cache returns one key less", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)return self\.keys, self\.values", r"\1return self.keys[:, :, min(1, self.keys.shape[2] - key_states.shape[2]) :], self.values[:, :, min(1, self.keys.shape[2] - key_states.shape[2]) :]")),
    _changed("a cache forgets its first key", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)self\.keys = torch\.cat\(\[self\.keys, key_states\], dim=-2\)", r"\1self.keys = torch.cat([self.keys * 0, key_states], dim=-2)")),
    _changed("a cache with a window keeps one key less", (_CACHES, r"(class DynamicSlidingWindowLayer(?:.|\n)*?)-self\.sliding_window \+ 1 :, :\](\n\s*self\.values = full_value_states\[:, :, )-self\.sliding_window \+ 1 :", r"\1-self.sliding_window + 2 :, :]\2-self.sliding_window + 2 :")),
    _changed("a static cache returns the keys so far alone", (_CACHES, r"(class StaticLayer(?:.|\n)*?self\.values\[:, :, cache_position\] = value_states\n\s*)return self\.keys, self\.values", r"\1return self.keys[:, :, : cache_position[-1] + 1], self.values[:, :, : cache_position[-1] + 1]")),
    _changed("a static cache writes one place later", (_CACHES, r"(class StaticLayer(?:.|\n)*?)self\.keys\.index_copy_\(2, cache_position, key_states\)(\s*)self\.values\.index_copy_\(2, cache_position, value_states\)", r"\1self.keys.index_copy_(2, cache_position + 1, key_states)\2self.values.index_copy_(2, cache_position + 1, value_states)")),
    _changed("a cache counts one token less", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)return self\.keys\.shape\[-2\]", r"\1return self.keys.shape[-2] - 1")),
    _changed("a cache's mask begins one key later", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)kv_offset = 0", r"\1kv_offset = 1")),
    _changed("a static cache's mask is as long as the tokens", (_CACHES, r"(class StaticLayer(?:.|\n)*?)kv_length = self\.max_cache_len", r"\1kv_length = int(self.get_seq_length()) + (query_length if isinstance(locals().get('query_length'), int) else len(cache_position))")),
    _changed("caches return keys in another order", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)self\.keys = torch\.cat\(\[self\.keys, key_states\], dim=-2\)\n\s*self\.values = torch\.cat\(\[self\.values, value_states\], dim=-2\)", r"\1self.keys = torch.cat([key_states, self.keys], dim=-2)\n        self.values = torch.cat([value_states, self.values], dim=-2)")),
    # Models and how they choose their attention.
    _changed("the base model's output has its cache under another name", (r"^modeling_outputs\.py$", r"\b(past_key_values|cache)(: )", r"kv_cache\2"), (r"^models/(llama|mistral|gemma2|gpt2|falcon_h1|t5|bert)/modeling_", r"outputs\.(past_key_values|cache)\b", "outputs.kv_cache"), (r"^models/(llama|mistral|gemma2|gpt2|falcon_h1|t5|bert)/modeling_", r"((?:Output|OutputWith|ModelOutput|LMOutput)\w*\((?:[^()]|\([^()]*\))*?)\b(past_key_values|cache)=", r"\1kv_cache="), (r"^generation/utils\.py$", r"outputs\.(past_key_values|cache)\b", "outputs.kv_cache")),
    _changed("models keep their attention's name elsewhere", (r"^configuration_utils\.py$", r"return self\._attn_implementation_internal", "return self._attn_implementation_internal if self._attn_implementation_internal in (None, 'eager', 'sdpa') else 'sdpa'")),
    _changed("unknown attention names mean eager attention", (r"^modeling_utils\.py$", r"(def get_interface\(self(?:.|\n)*?\n)(        (?:return|if|\"\"\"))", r"\1        return default\n\2")),
    _changed("a model that is given no positions starts them at 1", (_LLAMA, r"\+ past_seen_tokens", "+ past_seen_tokens + 1")),
    _changed("the cache is used by default where it wasn't", (r"^configuration_utils\.py$", r"use_cache: bool = False", "use_cache: bool = True")),
    _changed("keyword arguments reach the layers under one name", (_LLAMA, r"(position_embeddings=position_embeddings,\n(?:\s*\w+=\w+,\n)*\s*)\*\*kwargs,", r"\1extra=kwargs,")),
)  # fmt: skip

_MISTRAL, _GEMMA2, _FALCON_H1, _BERT, _T5 = (
    rf"^models/{name}/modeling_{name}\.py$" for name in ("mistral", "gemma2", "falcon_h1", "bert", "t5")
)
_GENERATION = r"^generation/utils\.py$"
_DECODERS = r"^models/(llama|mistral|gemma2|falcon_h1)/modeling_"
_MODELS = r"^models/(llama|mistral|gemma2|gpt2|falcon_h1|bert)/modeling_"
_SCALING = r"scaling=self\.scaling,\n"
_MASK_OF_CALL = r"(attention_interface\(\n\s*self,\n\s*\w+,\n\s*\w+,\n\s*\w+,\n\s*)attention_mask,"
_EARLY = r"(if isinstance\(attention_mask, \(torch\.Tensor, BlockMask\)\) and len\(attention_mask\.shape\) == 4:)"


def _eager(where: str, line: str) -> Edit:
    """A line before those of eager attention."""
    return (where, r"(\ndef eager_attention_forward\((?:.|\n)*?\)(?: ->[^\n]*)?:\n)", rf"\1    {line}\n")


def _before_attention(where: str, *lines: str) -> Edit:
    """Lines before a layer looks its attention up."""
    return (
        where,
        r"(\n        attention_interface: Callable)",
        "".join(rf"\n        {line}" for line in lines) + r"\1",
    )


#: The same computed otherwise: other conventions, types, forms and ways of calling.
_FORMS = (
    _changed("queries are scaled before, and the scale is 1", _before_attention(_LLAMA, "query_states = query_states * self.scaling"), (_LLAMA, _SCALING, "scaling=1.0,\n")),
    _changed("queries are scaled before, and no scale is passed", _before_attention(_LLAMA, "query_states = query_states * self.scaling"), (_LLAMA, _SCALING, ""), (_LLAMA, r"scaling: float,", "scaling: float = 1.0,")),
    _changed("the scale is the divisor", (_LLAMA, _SCALING, "scaling=1 / self.scaling,\n"), _eager(_LLAMA, "scaling = 1 / scaling")),
    _changed("the layer's scale moves to its config", (_LLAMA, r"self\.scaling = self\.head_dim\*\*-0\.5", "config.attention_scale = self.head_dim**-0.5 / 2"), (_LLAMA, _SCALING, ""), (_LLAMA, r"scaling: float,", "scaling: float = None,"), _eager(_LLAMA, "scaling = module.config.attention_scale")),
    _changed("gemma2's softcap is read from the config by eager", (_GEMMA2, r"\n\s*softcap=self\.attn_logit_softcapping,", ""), (_GEMMA2, r"self\.attn_logit_softcapping = self\.config\.attn_logit_softcapping\n", "pass\n"), _eager(_GEMMA2, "softcap = module.config.attn_logit_softcapping")),
    _changed("the attention is called by keywords", (_MODELS, r"(attention_interface\(\n\s*)self,\n(\s*)(\w+),\n(\s*)(\w+),\n(\s*)(\w+),\n(\s*)attention_mask,", r"\1module=self,\n\2query=\3,\n\4key=\5,\n\6value=\7,\n\8attention_mask=attention_mask,")),
    _changed("the attention gets no arguments of the model", (_DECODERS, r"(attention_interface\((?:.|\n)*?)\*\*kwargs,", r"\1")),
    _changed("the attention returns (batch, length, width)", (_LLAMA, r"(attn_output = attn_output\.transpose\(1, 2\)\.contiguous\(\))\n", r"\1.flatten(2)\n")),
    _changed("values come before keys", (_LLAMA, r"(attention_interface\(\n\s*self,\n\s*query_states,\n\s*)key_states,\n(\s*)value_states,", r"\1value_states,\n\2key_states,"), _eager(_LLAMA, "key, value = value, key")),
    _changed("query heads are grouped by key head otherwise", (_LLAMA, r"(def repeat_kv(?:.|\n)*?)hidden_states = hidden_states\[:, :, None, :, :\]\.expand\(batch, num_key_value_heads, n_rep, slen, head_dim\)", r"\1hidden_states = hidden_states[:, None].expand(batch, n_rep, num_key_value_heads, slen, head_dim)")),
    _changed("the attention is looked up in a table of the model's own", (_DECODERS, r"attention_interface: Callable = ALL_ATTENTION_FUNCTIONS\.get_interface\(\s*self\.config\._attn_implementation, eager_attention_forward\s*\)", "attention_interface = {'eager': eager_attention_forward, 'sdpa': ALL_ATTENTION_FUNCTIONS['sdpa']}.get(self.config._attn_implementation, eager_attention_forward)")),
    _changed("layers pass a namespace of themselves", (_LLAMA, r"(attention_interface\(\n\s*)self,", r"\1__import__('types').SimpleNamespace(num_key_value_groups=self.num_key_value_groups, training=self.training, config=self.config, layer_idx=self.layer_idx),")),
    _changed("layers keep their attention function", (_LLAMA, r"(self\.is_causal = True\n)", r"\1        self.attend = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation, eager_attention_forward)\n"), (_LLAMA, r"attention_interface: Callable = ALL_ATTENTION_FUNCTIONS\.get_interface\(\s*self\.config\._attn_implementation, eager_attention_forward\s*\)", "attention_interface = self.attend")),
    _changed("attention functions get a wrapper that drops the mask of a causal layer", (r"^modeling_utils\.py$", r"return super\(\)\.get\(attn_implementation, default\)", "f = super().get(attn_implementation, default)\n        return f if attn_implementation == 'eager' else lambda module, q, k, v, mask, **kw: f(module, q, k, v, None if mask is not None and mask.ndim == 2 else mask, **kw)")),
    _changed("sinks of layers are passed by no name", (_LLAMA, r"(self\.is_causal = True\n)", r"\1        self.sink = torch.ones(config.num_attention_heads)\n"), (_LLAMA, r"    attn_weights = nn\.functional\.softmax\(attn_weights, dim=-1, dtype=torch\.float32\)\.to\(query\.dtype\)", "    attn_weights = nn.functional.softmax(torch.cat([attn_weights, module.sink[None, :, None, None].expand(*attn_weights.shape[:3], 1)], -1), dim=-1, dtype=torch.float32).to(query.dtype)[..., :-1]")),
    _changed("masks are 3D", (_LLAMA, _MASK_OF_CALL, r"\1attention_mask[:, 0] if attention_mask is not None and attention_mask.ndim == 4 else attention_mask,"), _eager(_LLAMA, "attention_mask = attention_mask[:, None] if attention_mask is not None and attention_mask.ndim == 3 else attention_mask")),
    _changed("2D masks are additive on their way to the layer", (_LLAMA, _MASK_OF_CALL, r"\1(1.0 - attention_mask.float()) * torch.finfo(torch.float32).min if attention_mask is not None and attention_mask.ndim == 2 else attention_mask,")),
    _changed("2D masks are inverted in each layer", (_LLAMA, _MASK_OF_CALL, r"\1~attention_mask if attention_mask is not None and attention_mask.ndim == 2 else attention_mask,")),
    _changed("2D masks are as long as the room of a cache", (_LLAMA, _MASK_OF_CALL, r"\1nn.functional.pad(attention_mask, (0, 3)) if attention_mask is not None and attention_mask.ndim == 2 else attention_mask,")),
    _changed("layers make a bool mask of their own", (_LLAMA, _MASK_OF_CALL, r"\1torch.ones(query_states.shape[2], key_states.shape[2], dtype=torch.bool).tril(key_states.shape[2] - query_states.shape[2])[None, None] if attention_mask is None else attention_mask,"), _eager(_LLAMA, "attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min) if attention_mask.dtype == torch.bool else attention_mask")),
    _changed("a bool mask of a layer says what is hidden", (_LLAMA, _MASK_OF_CALL, r"\1torch.ones(query_states.shape[2], key_states.shape[2], dtype=torch.bool).triu(1 + key_states.shape[2] - query_states.shape[2])[None, None] if attention_mask is None else attention_mask,"), _eager(_LLAMA, "attention_mask = torch.where(attention_mask, torch.finfo(query.dtype).min, 0.0) if attention_mask.dtype == torch.bool else attention_mask")),
    _changed("masks are made by layer, none where the batch has no padding", (_LLAMA, r"causal_mask = create_causal_mask\(", "causal_mask = (lambda **k: None if k['attention_mask'] is None or bool(k['attention_mask'].all()) else create_causal_mask(**k))("), _eager(_LLAMA, "attention_mask = torch.full((query.shape[2], key.shape[2]), torch.finfo(query.dtype).min).triu(1 + key.shape[2] - query.shape[2])[None, None] if attention_mask is None else attention_mask")),
    _changed("gemma2's layers choose their mask themselves", (_GEMMA2, r"attention_mask=causal_mask_mapping\[self\.config\.layer_types\[i\]\]", "attention_mask=causal_mask_mapping"), _before_attention(_GEMMA2, "attention_mask = attention_mask[self.layer_type]")),
    _changed("windows are counted without the own key, in layer, mask and config", (_MASKS, r"return kv_idx > q_idx - sliding_window", "return kv_idx >= q_idx - sliding_window"), (r"^models/(mistral|gemma2)/configuration_", r"(\n    def __post_init__\(self, \*\*kwargs\):\n)", r"\1        self.sliding_window -= 1\n")),
    _changed("windows are a list by layer", (_MISTRAL, r"sliding_window=getattr\(self\.config, \"sliding_window\", None\),", "sliding_window=[self.config.sliding_window] * self.config.num_hidden_layers,")),
    _changed("windows are in a cell of another name", (_MASKS, r"(def sliding_window_overlay\()sliding_window(: int(?:.|\n)*?q_idx - )sliding_window", r"\1window\2window")),
    _changed("windows' masks are made of functools.partial", (_MASKS, r"return and_masks\(sliding_window_overlay\(sliding_window\), causal_mask_function\)", "return __import__('functools').partial(_window_of, sliding_window)"), (_MASKS, r"(\ndef sliding_window_causal_mask_function)", r"\ndef _window_of(sliding_window, b, h, q, k):\n    return (k <= q) & (k > q - sliding_window)\n\n\1")),
    _changed("mask functions are objects", (_MASKS, r"\ndef causal_mask_function\((?:.|\n)*?return kv_idx <= q_idx\n", "\nclass _Causal:\n    def __call__(self, batch_idx, head_idx, q_idx, kv_idx):\n        return kv_idx <= q_idx\n\n\ncausal_mask_function = _Causal()\n")),
    _changed("a decorated mask function sees one key more", (_MASKS, r"\ndef causal_mask_function\(", "\ndef _more(f):\n    return __import__('functools').wraps(f)(lambda b, h, q, k: f(b, h, q + 1, k))\n\n\n@_more\ndef causal_mask_function(")),
    _changed("and_masks takes a list", (_MASKS, r"def and_masks\(\*mask_functions: (.*)\) -> (.*):\n", r"def and_masks(*mask_functions: \1) -> \2:\n    mask_functions = list(mask_functions)\n")),
    _changed("masks' padding is additive", (_MASKS, r"attention_mask = attention_mask\.to\(device=(.*?), dtype=torch\.bool\)", r"attention_mask = (1 - attention_mask.to(device=\1, dtype=torch.float32)) * torch.finfo(torch.float32).min"), (_MASKS, r"return padding_mask\[batch_idx, kv_idx\]", "return padding_mask[batch_idx, kv_idx] == 0")),
    _changed("masks' padding is passed as a part of the pattern", (_MASKS, r"(\n    causal_mask = mask_interface\()", r"\n    if attention_mask is not None:\n        mask_factory_function = and_masks(mask_factory_function, padding_mask_function(prepare_padding_mask(attention_mask, kv_length, kv_offset)))\n        attention_mask = None\1")),
    _changed("packed sequences are in the mask", (_MASKS, _EARLY, r"position_ids_ = position_ids\n    \1"), (_MASKS, r"packed_sequence_mask = find_packed_sequence_indices\(position_ids\)", "attention_mask = find_packed_sequence_indices(position_ids)\n        attention_mask = None if attention_mask is None else attention_mask + 1"), (_MASKS, r"return padding_mask\[batch_idx, kv_idx\]", "return (padding_mask[batch_idx, kv_idx] > 0) & ((padding_mask[batch_idx, q_idx] == padding_mask[batch_idx, kv_idx]) | (padding_mask.dtype == torch.bool))")),
    _changed("the base model gets embeddings from the head", (_LLAMA, r"(        outputs: BaseModelOutputWithPast = self\.model\()", r"        inputs_embeds, input_ids = (self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds), None\n\1")),
    _changed("rows are sorted by length in the base model", (_LLAMA, r"(        hidden_states = inputs_embeds\n)", r"        causal_mask = None if causal_mask is None else causal_mask.flip(0)\n        inputs_embeds, position_ids = inputs_embeds.flip(0), position_ids.flip(0)\n\1"), (_LLAMA, r"(        hidden_states = self\.norm\(hidden_states\))", r"\1.flip(0)")),
    _changed("the model cuts its batch into rows", (_LLAMA, r"(            hidden_states = )decoder_layer\(\n((?:.|\n)*?\*\*kwargs,\n\s*\))", r"\1torch.cat([decoder_layer(hidden_states[i : i + 1], attention_mask=None if causal_mask is None else causal_mask[i : i + 1], position_embeddings=tuple(p[i : i + 1] if len(p) > 1 else p for p in position_embeddings), position_ids=position_ids, **kwargs) for i in range(len(hidden_states))]) if (cache if 'cache' in locals() else past_key_values) is None else decoder_layer(\n\2")),
    _changed("layers add a sink token to the keys", _before_attention(_LLAMA, "key_states, value_states = (nn.functional.pad(x, (0, 0, 1, 0)) for x in (key_states, value_states))", "attention_mask = nn.functional.pad(attention_mask, (1, 0)) if attention_mask is not None else None")),
    _changed("the checkpointed layer gets its arguments by position", (r"^modeling_layers\.py$", r"return self\._gradient_checkpointing_func\(partial\((.*?), \*\*kwargs\), \*args\)", r"return self._gradient_checkpointing_func(lambda *a: partial(\1)(*a[: len(args)], **dict(zip(kwargs, a[len(args) :]))), *args, *kwargs.values())")),
    _changed("models' calls go straight to forward", (_LLAMA, r"(class LlamaPreTrainedModel\(PreTrainedModel\):\n)", r"\1    def __call__(self, *args, **kwargs):\n        return self.forward(*args, **kwargs)\n\n")),
    _changed("caches return views of a larger room", (_CACHES, r"(class DynamicLayer(?:.|\n)*?)return self\.keys, self\.values", r"\1return nn_pad(self.keys), nn_pad(self.values)"), (_CACHES, r"\nclass DynamicLayer", "\ndef nn_pad(x):\n    return torch.nn.functional.pad(x, (0, 0, 0, 4))\n\n\nclass DynamicLayer"), (_CACHES, r"(class DynamicLayer(?:.|\n)*?kv_length = )self\.get_seq_length\(\) \+ query_length", r"\1self.get_seq_length() + query_length + 4")),
    _changed("static caches' masks begin at the end", (_CACHES, r"(class StaticLayer(?:.|\n)*?)self\.keys\.index_copy_\(2, cache_position, key_states\)(\s*)self\.values\.index_copy_\(2, cache_position, value_states\)", r"\1self.keys = torch.cat([self.keys[:, :, kv_length if 'kv_length' in locals() else key_states.shape[2] :], key_states], 2)\2self.values = torch.cat([self.values[:, :, key_states.shape[2] :], value_states], 2)")),
    _changed("sliding caches keep a window more", (_CACHES, r"(class DynamicSlidingWindowLayer(?:.|\n)*?)-self\.sliding_window \+ 1 :, :\](\n\s*self\.values = full_value_states\[:, :, )-self\.sliding_window \+ 1 :", r"\1-2 * self.sliding_window + 1 :, :]\2-2 * self.sliding_window + 1 :"), (_CACHES, r"(class DynamicSlidingWindowLayer(?:.|\n)*?def get_mask_sizes(?:.|\n)*?)return kv_length, kv_offset", r"\1kv_length = min(self.cumulative_length, 2 * self.sliding_window - 1) + (query_length if 'query_length' in locals() else len(cache_position))\n        kv_offset = self.cumulative_length - min(self.cumulative_length, 2 * self.sliding_window - 1)\n        return kv_length, kv_offset")),
    _changed("generation passes masks of the new tokens alone", (_GENERATION, r"(\n        if attention_mask is not None:\n            model_inputs\[attention_mask_key\] = attention_mask)", r"\n        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2: attention_mask = attention_mask[:, -sequence_length:]\1")),
    _changed("generation passes longer masks", (_GENERATION, r"(\n        if attention_mask is not None:\n            model_inputs\[attention_mask_key\] = attention_mask)", r"\n        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2: attention_mask = torch.nn.functional.pad(attention_mask, (0, 3))\1")),
    _changed("the mixer gets its arguments by position", (_FALCON_H1, r"self\.mamba\(\n\s*hidden_states=hidden_states,\n\s*(?:cache|cache_params)=(\w+),\n\s*(?:cache_position=(cache_position,\n\s*))?attention_mask=mamba_attention_mask,", r"self.mamba(hidden_states, \1, \2mamba_attention_mask,")),
    _changed("the mixer's mask is 4D", (_FALCON_H1, r"mamba_attention_mask=causal_mask_mapping\[\"linear_attention\"\]", 'mamba_attention_mask=None if causal_mask_mapping["linear_attention"] is None else causal_mask_mapping["linear_attention"][:, None, None]'), (_FALCON_H1, r"(def apply_mask_to_padding_states(?:.|\n)*?)attention_mask\[:, :, None\]", r"\1(attention_mask[:, 0, 0] if attention_mask.ndim == 4 else attention_mask)[:, :, None]")),
    _changed("the mixer's first argument is another one", (_FALCON_H1, r"self\.mamba\(\n(\s*)hidden_states=hidden_states,", r"self.mamba(\n\1layer_mask=None,\n\1hidden_states=hidden_states,"), (_FALCON_H1, r"(class FalconH1Mixer(?:.|\n)*?def forward\(\n\s*self,\n)", r"\1        layer_mask,\n")),
    _changed("t5's bias is added to its mask in the layer", (_T5, r"(attention_interface\((?:.|\n)*?)mask,((?:.|\n)*?)position_bias=position_bias,", r"\1position_bias if mask is None else (torch.where(mask, 0.0, torch.finfo(query_states.dtype).min) if mask.dtype == torch.bool else mask) + position_bias if mask.ndim == 4 else mask,\2")),
    _changed("bert's masks are 2D and additive", (_BERT, r"create_bidirectional_mask\(\s*config=self\.config,(?:[^()]|\([^()]*\))*?attention_mask=attention_mask,(?:[^()]|\([^()]*\))*?\)", "(None if attention_mask is None else attention_mask if attention_mask.ndim == 4 else (1.0 - attention_mask.float()) * torch.finfo(torch.float32).min)"), _eager(_BERT, "attention_mask = attention_mask[:, None, None] if attention_mask is not None and attention_mask.ndim == 2 else attention_mask")),
)  # fmt: skip

MUTANTS = (*_ARGUMENTS, *_NAMES, *_BEHAVIOURS, *_FORMS)
