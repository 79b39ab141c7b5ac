"""Train steps as the users of each framework write them: only the decorator is autopar's. `python -m examples.NAME`."""
