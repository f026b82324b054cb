"""Leaves out the examples that need packages that are not there; `make examples` installs them."""

from __future__ import annotations

import importlib.util

NEEDED = {"test_digits.py": "sklearn", "test_torch_embeddings.py": "torch"}
collect_ignore = [file for file, package in NEEDED.items() if importlib.util.find_spec(package) is None]
