"""Leases: of the chief and the workers of a training, and of private accumulators."""
