"""Whole windows on a device."""
