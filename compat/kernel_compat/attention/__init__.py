"""From the arguments of transformers' attention functions to the arguments of a kernel."""
