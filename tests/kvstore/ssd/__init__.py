"""Tests of the SSD tier."""
