"""Leaves out the examples that need packages that are not there; `make examples` installs them."""

import importlib.util
import sys
from pathlib import Path

# What runs the blocks of a page.
sys.path.append(str(Path(__file__).parents[1] / "docs"))

NEEDED = {
    "test_comparison.py": ["sklearn", "torch"],
    "test_encoding_errors.py": ["sklearn"],
    "test_frameworks.py": ["accelerate", "lightning", "transformers"],
    "test_jax_guide.py": ["equinox", "flax", "jax", "optax"],
    "test_local_steps_example.py": ["sklearn"],
    "test_optax.py": ["jax", "optax"],
}
collect_ignore = [file for file, packages in NEEDED.items() if not all(map(importlib.util.find_spec, packages))]
