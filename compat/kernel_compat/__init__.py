"""One attention choice that means the same on every supported transformers, torch and FlashAttention.

import kernel_compat

kernel_compat.register_attention("my_flash_attention", kernel="flash_attention_2")
kernel_compat.install()
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="my_flash_attention")
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take ten times as long as the rest
if TYPE_CHECKING:
    from typing import Any

    from . import models, ops, policy
    from .attention.defaults import (
        Report,
        install,
        installed,
        register_attention,
        registered_attention,
        status,
        uninstall,
        unregister_attention,
    )
    from .attention.names import AttentionName
    from .attention.sequence_parallel.ulysses import ulysses
    from .choosing.torch_backend import use_torch_flash_backend
    from .environment import Device, Environment
    from .errors import KernelCompatError, KernelUnavailableError, SeamError, UnsupportedFeatureError
    from .kernels import Features, Functions, Kernel, Provider, known_kernels
    from .patching.handle import Handle
    from .patching.report import ShimReport
    from .patching.seam import Seam
    from .patching.shim import Shim

# Loaded on first use, so that the import costs next to nothing.
_HOMES = {
    "environment": ("Device", "Environment"),
    "errors": ("KernelCompatError", "KernelUnavailableError", "SeamError", "UnsupportedFeatureError"),
    "patching.handle": ("Handle",),
    "patching.report": ("ShimReport",),
    "patching.seam": ("Seam",),
    "patching.shim": ("Shim",),
    "kernels": ("Features", "Functions", "Kernel", "Provider", "known_kernels"),
    "attention.defaults": (
        "Report",
        "install",
        "installed",
        "register_attention",
        "registered_attention",
        "status",
        "uninstall",
        "unregister_attention",
    ),
    "attention.names": ("AttentionName",),
    "attention.sequence_parallel.ulysses": ("ulysses",),
    "choosing.torch_backend": ("use_torch_flash_backend",),
}
_MODULES = ("models", "ops", "policy")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AttentionName",
    "Device",
    "Environment",
    "Features",
    "Functions",
    "Handle",
    "Kernel",
    "KernelCompatError",
    "KernelUnavailableError",
    "Provider",
    "Report",
    "Seam",
    "SeamError",
    "Shim",
    "ShimReport",
    "UnsupportedFeatureError",
    "install",
    "installed",
    "known_kernels",
    "models",
    "ops",
    "policy",
    "register_attention",
    "registered_attention",
    "status",
    "ulysses",
    "uninstall",
    "unregister_attention",
    "use_torch_flash_backend",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
