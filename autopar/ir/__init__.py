"""The nouns: frozen data that flows from pass to pass. Imports nothing of ours but `errors`."""
