"""Reads PEFT's configuration."""
