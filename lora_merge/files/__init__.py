"""Containers and codecs."""
