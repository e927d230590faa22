"""The facts and the end of a run that writes an adapter."""
