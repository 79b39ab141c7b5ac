"""Jobs of several processes on this machine's loopback, each with a time limit."""
