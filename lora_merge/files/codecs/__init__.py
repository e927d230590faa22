"""Codecs: how the numbers of a weight are stored, one file for each way. Headers only, torch inside functions."""
