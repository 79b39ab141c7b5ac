"""Measurements and runs on real input: `python -m benchmarks.NAME`."""
