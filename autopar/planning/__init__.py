"""The search: from a traced step and a cluster to a plan, its price, and why it is so."""
