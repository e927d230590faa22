"""Adapters as outputs: combine, resize, extract, convert, average."""
