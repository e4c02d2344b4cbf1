"""The attentions that can run here, fallbacks between them, and settings to decide before a model is loaded."""
