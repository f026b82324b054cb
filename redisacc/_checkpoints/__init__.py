"""Checkpoints: the parameters, the state and the step of a run in files."""
