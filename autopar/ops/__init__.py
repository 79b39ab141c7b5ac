"""Operators that users call and the planner knows: the same on every backend, as fast as each allows."""
