"""A plan becomes bytes."""
