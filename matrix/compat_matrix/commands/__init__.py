"""The commands that make cells run; each module has `add_arguments` and `run`, as those of `views` do."""
