"""Averages of snapshots of one training."""
