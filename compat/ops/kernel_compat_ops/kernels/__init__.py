"""The kernels themselves, each imported when it is bound."""
