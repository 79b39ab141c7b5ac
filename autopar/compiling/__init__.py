"""From a plan to what runs: the programs as XLA is given them, compiled for what is there or held against XLA."""
