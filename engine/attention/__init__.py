"""Attention over paged KV: one interface, several back ends."""
