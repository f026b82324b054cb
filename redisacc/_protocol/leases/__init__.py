"""Leases: of the chief and the workers of a run, and of private accumulators."""
