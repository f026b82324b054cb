"""Leaves out the live comparison with torch where torch is missing: `make conformance` runs it."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["test_optimizers_live.py", "torch_optimizers.py"]
