"""Changes other projects' attributes and changes them back. Knows nothing of attention."""
