"""Python runs this when it starts, if this folder is on its path: the process follows the clock of a test."""

import os
import sys
from pathlib import Path

if "REDISACC_TEST_CLOCK" in os.environ:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import moved_clock

    del sys.path[0]
    moved_clock.follow(os.environ["REDISACC_TEST_CLOCK"])
