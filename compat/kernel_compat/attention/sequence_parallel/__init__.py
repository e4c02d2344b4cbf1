"""Attention over a sequence that is spread over several ranks."""
