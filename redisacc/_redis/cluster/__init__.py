"""A Redis Cluster: its slots, and which node a command goes to."""
