"""Plugins of frameworks, each over the same settings: none is imported but by its framework."""
