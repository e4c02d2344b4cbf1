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
    from .api import (
        Report,
        attention_function,
        install,
        installed,
        mask_function,
        register_attention,
        registered_attention,
        status,
        uninstall,
        unregister_attention,
    )
    from .attention.names import AttentionName, ForwardSpec
    from .attention.parallel.accelerate_mesh import accelerate_mesh
    from .attention.parallel.sharding import ContextParallel
    from .attention.parallel.ulysses import ulysses
    from .attention.protocols import AttentionForward, MaskFunction
    from .environment import Device, Environment
    from .errors import (
        AttentionRefusedError,
        KernelCompatError,
        KernelCompatWarning,
        KernelUnavailableError,
        MissingExtraError,
        RenamedWarning,
        SeamError,
        UnknownNameError,
        UnprotectedError,
        UnprotectedWarning,
        UnprovenWarning,
        UnsupportedFeatureError,
    )
    from .kernels import Features, Kernel, known_kernels
    from .patching.handle import Handle
    from .patching.report import ShimReport
    from .patching.seam import Read, Seam
    from .patching.shim import Shim
    from .policy.torch_backend import use_torch_flash_backend

#: The modules that have the public names. Each is imported on first use, so that this import costs next to nothing.
_HOMES = (
    *("errors", "environment", "patching.handle", "patching.seam", "patching.shim", "kernels", "api"),
    *(
        "patching.report",
        "attention.names",
        "attention.protocols",
        "attention.parallel.accelerate_mesh",
        "attention.parallel.sharding",
        "attention.parallel.ulysses",
    ),
    "policy.torch_backend",
)

__all__ = [
    "AttentionForward",
    "AttentionName",
    "AttentionRefusedError",
    "ContextParallel",
    "Device",
    "Environment",
    "Features",
    "ForwardSpec",
    "Handle",
    "Kernel",
    "KernelCompatError",
    "KernelCompatWarning",
    "KernelUnavailableError",
    "MaskFunction",
    "MissingExtraError",
    "Read",
    "RenamedWarning",
    "Report",
    "Seam",
    "SeamError",
    "Shim",
    "ShimReport",
    "UnknownNameError",
    "UnprotectedError",
    "UnprotectedWarning",
    "UnprovenWarning",
    "UnsupportedFeatureError",
    "accelerate_mesh",
    "attention_function",
    "install",
    "installed",
    "known_kernels",
    "mask_function",
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


#: Names that were public before 0.3: where each is, and what there is instead.
_WITHDRAWN = {
    "Functions": "kernels.Functions is what Kernel.load returns; nothing public takes or replaces it",
    "Provider": "register_attention(kernel=) takes any object with a flash_attn_varlen_func and an attribute features",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("models", "ops", "policy"):
        return importlib.import_module(f".{name}", __name__)
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f".{home}", __name__)
        if name in module.__all__:
            return globals().setdefault(name, getattr(module, name))
    if name in _WITHDRAWN:
        import warnings

        from .errors import RenamedWarning

        message = f"kernel_compat.{name} is not public any more: {_WITHDRAWN[name]}"
        warnings.warn(message, RenamedWarning, stacklevel=2)
        return getattr(importlib.import_module(".kernels", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
