"""Lets tests import the benchmarks, and leaves the tests out where those are not part of an installation."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
collect_ignore_glob = [] if (ROOT / "benchmarks").is_dir() else ["test_*.py"]
