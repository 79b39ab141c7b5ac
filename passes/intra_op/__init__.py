"""The intra-op pass: one sharding strategy per equation, chosen by an integer program."""
