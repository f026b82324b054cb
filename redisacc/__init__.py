"""Conditional gradient accumulators, dense and sparse, shared by name over Redis."""

__version__ = "0.1.0"
