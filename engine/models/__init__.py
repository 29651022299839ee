"""Decoder-only model families."""
