"""This machine measured: its kernels, its links, and how much slower they are in steps."""
