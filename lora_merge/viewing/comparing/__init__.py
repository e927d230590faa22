"""Comparisons of what two adapters store."""
