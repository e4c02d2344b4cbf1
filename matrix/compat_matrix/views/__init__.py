"""Views of the store, most of which are commands: `run` takes the values of the arguments and returns the exit code."""
