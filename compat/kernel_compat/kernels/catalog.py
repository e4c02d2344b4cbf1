"""The table of kernels: every attention name with its packages, and the features of each by version and GPU generation.

It imports neither torch nor a kernel. `explain`, the ladder, `check`, error messages and the tables of the documentation read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..environment import SHIPS, Environment
from . import flex, torch_varlen
from .primitives import PackagePrimitives
from .provider import Features, Limit, Provider

__all__ = [
    "CATALOG",
    "FLEXIBLE",
    "REFERENCE",
    "TORCH_BACKENDS",
    "TRANSFORMERS",
    "TorchBackend",
    "instead",
    "kernels_with",
]


def _package(distribution: str, features: Features, install: str, **facts: Any) -> Provider:
    return Provider(SHIPS[distribution][0], distribution, features, install, **facts)


def _as_built(config: str) -> Callable[[Any, Features], Features]:
    """FlashAttention-3 may be built without some features: a module beside the interface records which."""

    def refine(module: Any, features: Features) -> Features:
        try:
            flags = importlib.import_module(config).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            return features

        def built(part: str) -> bool:
            return not flags.get(f"FLASHATTENTION_DISABLE_{part}", False)

        return replace(
            features,
            window=features.window and built("LOCAL"),
            softcap=features.softcap and built("SOFTCAP"),
            paged=features.paged and built("PAGEDKV") and built("APPENDKV"),
            backward=features.backward and built("BACKWARD"),
            dtypes=features.dtypes if built("FP16") else ("bfloat16",),
        )

    return refine


#: Attention sinks for a kernel whose functions take none.
_SINKS_FROM_LSE: dict[str, Any] = {"sinks": True, "sinks_from": "log-sum-exp"}

FLASH_ATTN = _package(
    "flash-attn",
    Features(
        right_limit="keys",
        softcap=True,
        dropout=True,
        deterministic=True,
        paged=True,
        head_dim_multiple=8,
        min_capability=(8, 0),
        **_SINKS_FROM_LSE,
    ),
    "Install it where torch is installed already: pip install --no-build-isolation flash-attn",
    minimum=("2.6", "the first with softcap"),
    unpaged_because=lambda page_size, head_dim: (
        f"its pages are multiples of 256 tokens, not of {page_size}" if page_size % 256 else None
    ),
    primitives=PackagePrimitives(
        "flash_attn.flash_attn_interface",
        dense=("_flash_attn_forward", "_flash_attn_backward"),
        varlen=("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    ).load,
)

_BUILD_FA3 = "flash-attn-3 is on no package index: build it from the hopper folder of the flash-attention source"
_HOPPER: dict[str, Any] = {
    "head_dim_multiple": 8,
    "min_capability": (9, 0),
    "max_capability": (9, 9),
    **_SINKS_FROM_LSE,
}
_FA3 = ("_flash_attn_forward", "_flash_attn_backward")

FLASH_ATTN_3 = _package(
    "flash-attn-3",
    Features(softcap=True, deterministic=True, paged=True, **_HOPPER),
    f"{_BUILD_FA3}, or install its forward alone: pip install fa3-fwd",
    renamed={"block_table": "page_table"},
    refine=_as_built("flash_attn_config"),
    primitives=PackagePrimitives("flash_attn_interface", dense=_FA3, varlen=_FA3).load,
)
FA3_FWD = _package(
    "fa3-fwd",
    Features(softcap=True, window=False, backward=False, dtypes=("bfloat16",), **_HOPPER),
    "Install it with: pip install fa3-fwd",
    renamed={"block_table": "page_table"},
    refine=_as_built("fa3_fwd_config"),
    primitives=PackagePrimitives("fa3_fwd_interface", dense=_FA3, varlen=_FA3).load,
)

_FA4 = ("_flash_attn_fwd", "_flash_attn_bwd")

#: Compute capability 8.x has a forward only. The limits are read from flash_attn/cute/interface.py of the releases 4.0.0b3 to
#: 4.0.0b36, except where another source is named.
FLASH_ATTN_4 = _package(
    "flash-attn-4",
    Features(
        softcap=True,
        sinks=True,
        deterministic=True,
        # Measured on sm_90 with 4.0.0b36, for 8 to 256: for others dq is off by its own size (Dao-AILab/flash-attention#2896).
        head_dim_multiple=32,
        min_capability=(9, 0),
    ),
    "Install it with: pip install --pre flash-attn-4",
    renamed={"s_aux": "learnable_sink"},
    unlimited=None,
    primitives=PackagePrimitives("flash_attn.cute.interface", dense=_FA4, varlen=_FA4, unlimited=None).load,
    # Its autograd function asks for the active fake mode, which Dynamo refuses to trace (seen with 4.0.0b36 and torch 2.11).
    traced=False,
    limits=(
        Limit({"max_capability": (11, 9)}, before="4.0.0b5"),
        Limit({"deterministic": False}, before="4.0.0b5", capabilities=(9,)),
        # The dense backward ignores softcap, without an error; the varlen backward refuses it.
        Limit(forward_only=("softcap",), before="4.0.0b9"),
        # Their autograd functions return None for the sinks, without an error. 4.0.0b26 has the same code for them as 4.0.0b30.
        Limit({"sinks_from": "log-sum-exp"}, before="4.0.0b26"),
        # Above 128 only these two pairs: (192, 192) is refused.
        Limit({"max_head_dim": 128, "head_dims": ((192, 128), (256, 256))}, capabilities=(10, 11)),
        Limit({"head_dims": ((192, 128),)}, before="4.0.0b11", capabilities=(10, 11)),
        # (256, 256) has kernels of its own, which assert that softcap and sinks are unset.
        Limit({"plain_backward_head_dims": ((256, 256),)}, capabilities=(10, 11)),
        Limit({"plain_head_dims": ((256, 256),)}, before="4.0.0b34", capabilities=(10, 11)),
        # Its own sinks are refused by the forward (flash_fwd.py), `deterministic` by the backward; more than 192 doesn't fit into
        # the 99 KB of shared memory (can_implement in flash_fwd_sm120.py and flash_bwd_sm120.py).
        Limit({"sinks_from": "log-sum-exp", "deterministic": False, "max_head_dim": 192}, capabilities=(12,)),
        # The backward takes a window and ignores it, without an error (flash_bwd.py).
        Limit(forward_only=("window",), before="4.0.0b21", capabilities=(12,)),
    ),
)

TORCH = Provider(
    "torch.nn.attention.varlen",
    "torch",
    Features(
        right_limit="keys",
        deterministic=True,
        paged=True,
        head_dim_multiple=8,
        min_capability=(8, 0),
        **_SINKS_FROM_LSE,
    ),
    "Install a newer torch: pip install --upgrade 'torch>=2.10'",
    minimum=("2.10", "the first with torch.nn.attention.varlen"),
    limits=(Limit({"window": False}, before="2.11"), Limit({"paged": False}, before="2.13")),
    bundled=True,
    refine=torch_varlen.refine,
    functions=torch_varlen.functions,
    takes_rows=False,
    unpaged_because=torch_varlen.unpaged_because,
    runs_on=torch_varlen.runs_on,
    primitives=torch_varlen.Primitives,
)

_ANYWHERE: dict[str, Any] = {
    "dropout": True,
    "dtypes": ("float32", "float64", "bfloat16", "float16"),
    "devices": ("cpu", "cuda", "xpu", "mps", "npu", "hpu"),
    "max_head_dim": None,
    "value_head_dim": True,
}

OWN = Provider(
    "kernel_compat.kernels.reference",
    "kernel-compat",
    Features(softcap=True, sinks=True, deterministic=True, masks=True, **_ANYWHERE),
    "",
    bundled=True,
    functions=lambda module: {"attend": module.attend},
)

FLEX = Provider(
    "torch.nn.attention.flex_attention",
    "torch",
    Features(
        softcap=True,
        sinks=True,
        masks=True,
        dtypes=("float32", "bfloat16", "float16"),
        devices=("cuda", "cpu"),
        max_head_dim=None,
        head_dim_multiple=16,
        value_head_dim=True,
        min_capability=(8, 0),
        no_backward_on=("cpu",),
    ),
    "Install a newer torch: pip install --upgrade 'torch>=2.10'",
    minimum=("2.10", "the oldest that is supported"),
    bundled=True,
    functions=lambda module: {"attend": flex.attend},
)

#: The name of the kernel that runs everywhere.
REFERENCE = "flash_attention_reference"
#: The name of the kernel that takes every mask, bias and head dimension, on a GPU.
FLEXIBLE = "flash_attention_flex"

#: The backends of torch's SDPA, the fastest on an H200 first: see docs/benchmarks.md.
SDPA_BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")

#: Kernels by attention name, the newest FlashAttention first, each with its packages in order of preference.
CATALOG: Mapping[str, tuple[Provider, ...]] = MappingProxyType(
    {
        "flash_attention_4": (FLASH_ATTN_4,),
        "flash_attention_3": (FLASH_ATTN_3, FA3_FWD),
        "flash_attention_2": (FLASH_ATTN,),
        "flash_attention_torch": (TORCH,),
        FLEXIBLE: (FLEX,),
        REFERENCE: (OWN,),
    }
)

#: transformers' own two. Its sdpa has no softcap, and drops it silently before 5.21.
TRANSFORMERS: Mapping[str, Features] = MappingProxyType(
    {
        "sdpa": Features(varlen=False, masks=True, **_ANYWHERE),
        "eager": Features(varlen=False, softcap=True, sinks=True, deterministic=True, masks=True, **_ANYWHERE),
    }
)


@dataclass(frozen=True)
class TorchBackend:
    """A FlashAttention that torch's own attention can run on, from torch 2.11 on.

    Attributes:
        package: the package that torch imports.
        capabilities: major compute capabilities that torch takes it on, in 2.11 to 2.15.
        install: a sentence that says how to install it.
    """

    package: Provider
    capabilities: tuple[int, ...]
    install: str


TORCH_BACKENDS: Mapping[str, TorchBackend] = MappingProxyType(
    {
        "FA3": TorchBackend(FLASH_ATTN_3, (9,), f"{_BUILD_FA3}."),
        "FA4": TorchBackend(FLASH_ATTN_4, (9, 10), FLASH_ATTN_4.install),
    }
)


def kernels_with(able: Callable[[Provider, Features], bool], environment: Environment) -> list[str]:
    """The names of the kernels whose package is `able`, in the version that is installed and on the GPUs that are there.

    Kernels that aren't installed are included, with the features of their newest version. Where there are GPUs, kernels that
    run on none of them are left out.
    """
    names = []
    for name, packages in CATALOG.items():
        installed = [package for package in packages if not package.absent_because(environment)] or packages
        fitting = [p for p in installed if not (environment.devices and p.no_device_because(environment))]
        if any(able(package, package.features_in(environment)) for package in fitting):
            names.append(name)
    return names


def instead(name: str, feature: str, *, gradients: bool = False) -> str:
    """The sentence that names the kernels with a feature that the kernel `name` lacks, in this environment.

    Args:
        gradients: whether the feature must have gradients.
    """

    def able(package: Provider, features: Features) -> bool:
        has: bool = getattr(features, feature)
        return has and not (gradients and (not features.backward or feature in features.forward_only))

    names = [other for other in kernels_with(able, Environment.detect()) if other != name]
    return f"Kernels that do: {', '.join(names)}." if names else "No kernel does."
