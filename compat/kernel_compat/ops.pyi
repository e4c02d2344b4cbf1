# The types of the names that ops.py looks up when they are read. Nothing here runs.
from kernel_compat_ops import *  # noqa: F403
