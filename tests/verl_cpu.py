"""verl on a CPU, for which it has no platform: one of its registry, loaded by ``VERL_USE_EXTERNAL_MODULES=verl_cpu``.

The FSDP workers are verl's own, by ``VERL_ENGINE_DEVICE=cuda``.
"""

from __future__ import annotations

import abc
from contextlib import nullcontext
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class NoDevice:
    """torch.cpu, and nothing where a device has more."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"get_device_name": "cpu", "mem_get_info": (0, 0)}
        return getattr(torch.cpu, name, None) or (lambda *_, **__: answers.get(name, 0))


def nothing(*_: Any, **__: Any) -> None:
    pass


VALUES = {
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": NoDevice(),
    "is_available": lambda self: True,
    "current_device": lambda self: "cpu",
    "device_count": lambda self: 1,
    "get_device_capability": lambda self, device_index=0: (None, None),
    "communication_backend_name": lambda self: "gloo",
    "visible_devices_envvar": lambda self: "CPU_VISIBLE_DEVICES",
    "ray_resource_name": lambda self: "CPU",
    "nvtx_range": lambda self, msg: nullcontext(),
}
abstract = {name for name, value in vars(PlatformBase).items() if getattr(value, "__isabstractmethod__", False)}
Cpu = abc.ABCMeta("Cpu", (PlatformBase,), {**dict.fromkeys(abstract, nothing), **VALUES})
PlatformRegistry.register("cpu")(Cpu)


def initialize(*_: Any, **__: Any) -> None:
    """In the place of a backend for the CPU and one for a device, which are the same here."""
    torch.distributed.init_process_group("gloo")


verl.utils.distributed.initialize_global_process_group = initialize
