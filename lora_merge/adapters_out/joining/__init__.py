"""Adapters that are joined by their names alone."""
