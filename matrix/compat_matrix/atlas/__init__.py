"""The seam atlas: what releases of transformers, torch and FlashAttention have in the place of the library's seams.

Read from the published wheels, of which a few modules each are fetched and nothing is installed or imported.
"""
