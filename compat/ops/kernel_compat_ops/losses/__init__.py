"""Losses fused with the head that makes the logits."""
