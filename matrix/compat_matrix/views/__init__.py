"""Views of the store. Each module is a command: `ARGUMENTS` are its arguments, and `run` takes their values.

`run` returns the exit code; ``arguments.store`` is the store's URL.
"""
