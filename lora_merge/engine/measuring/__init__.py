"""Numbers of a merge, recorded while its blocks are folded."""
