"""Seconds and bytes: pure functions of a cluster and of what would run on it."""
