"""The way to the server: connections, commands, replies, pub/sub. Knows nothing about accumulators."""
