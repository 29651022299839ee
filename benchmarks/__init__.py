"""Measurements behind the numbers in the README; each prints its own table."""
