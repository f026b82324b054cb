"""Leaves out the tests of libraries that are not there; `make foreign` installs them, each in an environment."""

import importlib.util

LIBRARIES = ("jax", "pandas", "scipy", "tensorflow", "torch")
collect_ignore = [f"test_{library}.py" for library in LIBRARIES if importlib.util.find_spec(library) is None]
