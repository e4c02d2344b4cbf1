"""From the arguments that transformers passes to an attention function to the arguments of a kernel."""
