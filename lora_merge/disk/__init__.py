"""Bytes on disks."""
