"""Weights that the output stores in another way than the base."""
