"""Adopting a release: its steps, in a git worktree of a branch of its own, and the report on them."""
