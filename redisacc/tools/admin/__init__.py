"""Tools for operators: lists of accumulators, their memory, their rows, garbage, and access rules."""
