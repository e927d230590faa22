"""Whether an output is right."""
