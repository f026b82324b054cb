"""Measures how much of a training is left when processes are killed: ``python -m benchmarks.goodput``."""
