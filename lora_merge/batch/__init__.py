"""Many merges from one file."""
