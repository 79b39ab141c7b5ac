"""Decisions: pure functions from noun to noun, one pass a file."""
