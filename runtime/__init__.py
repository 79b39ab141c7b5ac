"""Numbers on devices: runs what was planned, and never asks why."""
