"""Adapters in Python that are added, scaled, measured and saved."""
