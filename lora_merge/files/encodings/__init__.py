"""Encodings: how the values of a weight become bytes, and bytes values. torch is imported in functions."""
