"""A padded batch without its padding: a model's layers and its head run on the real tokens, as one packed row.

A model computes embeddings, positions and masks for the padded batch. Hooks of its layers gather the real tokens before the first layer
and scatter them after the last one. The head of a language model gets the real tokens too.
"""
