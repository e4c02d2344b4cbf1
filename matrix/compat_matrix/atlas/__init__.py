"""The seam atlas: the library's seams in the releases of transformers, torch and FlashAttention.

It is read from a few modules of each published wheel; nothing is installed or imported.
"""
