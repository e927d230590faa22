"""Matching of one adapter with one base."""
