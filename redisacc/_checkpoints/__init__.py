"""Checkpoints: the parameters, the state and the step of a training in files."""
