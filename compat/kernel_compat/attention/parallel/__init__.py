"""Attention over a sequence whose tokens are spread over several ranks: who holds which tokens, and how keys get to queries."""
