"""Proves that an output is right."""
