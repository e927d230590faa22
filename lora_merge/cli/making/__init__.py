"""The commands that write adapters."""
