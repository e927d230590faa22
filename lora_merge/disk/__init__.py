"""Reads, writes, hashes and names files."""
