"""The names that a project uses and patches upstream, in each release. Its files are parsed, not imported."""
