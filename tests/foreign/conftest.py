"""Leaves out the tests of libraries that are not there; `make foreign` installs them, each in an environment."""

from __future__ import annotations

import importlib.util

NEEDED = {"test_jax.py": "jax", "test_tensorflow.py": "tensorflow", "test_torch.py": "torch"}
collect_ignore = [file for file, package in NEEDED.items() if importlib.util.find_spec(package) is None]
