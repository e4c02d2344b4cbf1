"""The shims of kernel-compat: one module for each version boundary, found through the entry points ``kernel_compat.shims``."""
