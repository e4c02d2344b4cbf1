"""What is proven of the model types of transformers, and the check of a model as it is loaded."""
