"""Which attention runs here, and what to settle before a model is loaded."""
