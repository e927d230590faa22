"""Reads and writes containers and codecs."""
