"""From finished outputs back to their jobs."""
