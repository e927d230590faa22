"""Merges tensors in memory: state dicts and live models."""
