"""Matrices that are never in memory as a whole: their rows are computed when they are asked for."""
