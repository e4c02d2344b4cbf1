"""The formulas of modules, proven by calling them with a few inputs."""
