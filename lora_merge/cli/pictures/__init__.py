"""Pictures on a terminal."""
