"""Conversions without a base, and in an adapter's own words."""
