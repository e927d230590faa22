"""Adapter meets base."""
