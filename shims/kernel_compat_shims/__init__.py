"""The shims of kernel-compat: one module a version boundary, found through the entry points ``kernel_compat.shims``."""
