"""Saved and restored: a step's state, whatever plan it is kept by."""
