"""Attention over a sequence whose tokens are spread over several ranks."""
