"""What install() finds once this package is installed: its shim, and its attention name."""

from __future__ import annotations

from transformers.integrations import sdpa_attention

import kernel_compat

report = kernel_compat.install()
(shim,) = (shim for shim in report.shims if shim.name == "acme_repeated_keys")
print(f"{shim.name}: {shim.state}, {shim.seams[0]}")
print(f"acme_flash: {report.attention['acme_flash']}")
print("repeat_kv is now that of", sdpa_attention.repeat_kv.__module__)
kernel_compat.uninstall()
print("repeat_kv is again that of", sdpa_attention.repeat_kv.__module__)
