"""Encodings: how the numbers of a weight become bytes, and bytes numbers. torch is imported in functions."""
