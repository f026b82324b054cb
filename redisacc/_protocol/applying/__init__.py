"""Applies gradients: requests that are counted exactly once, in place, buffered, or in partitions."""
