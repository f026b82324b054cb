"""What happens on a server, as it happens: the state of accumulators, the times of rounds, and the server's load."""
