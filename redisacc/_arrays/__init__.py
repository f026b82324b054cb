"""Gradients in numpy: how arguments are checked, summed and returned. Nothing here knows about Redis."""
