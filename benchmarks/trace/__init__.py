"""Draws who waits for whom in a step, as lanes of threads and servers: ``python -m benchmarks.trace``."""
