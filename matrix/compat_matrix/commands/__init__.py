"""The commands other than views, a module each with `run`, and `ARGUMENTS` or `add_arguments`."""
