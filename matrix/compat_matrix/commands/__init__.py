"""The commands other than views, a module each with `add_arguments` and `run`."""
