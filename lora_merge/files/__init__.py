"""Reads and writes containers, folders and stored numbers."""
