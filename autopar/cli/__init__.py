"""The command line: what is typed, and what the commands do."""
