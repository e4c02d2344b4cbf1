"""Views of the store. Each module is a command: `add_arguments` takes its parser, `run` its arguments.

`run` returns the exit code; ``arguments.store`` is the store's URL.
"""
