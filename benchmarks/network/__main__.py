"""Entry point of ``python -m benchmarks.network``."""

import sys

from benchmarks.network.cli import main

sys.exit(main())
