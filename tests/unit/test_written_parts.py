"""Parts last until the last one of them has been uploaded."""

import numpy as np
from support.rows import every_row

from redisacc._format.keys import Keys
from redisacc._protocol.applying.attempts import written


@every_row("megabytes, expiry_ms", [(0.1, 60_000), (60, 60_000), (300, 300_000)])
def test_parts_have_a_second_for_each_megabyte_that_is_sent_with_them(megabytes, expiry_ms):
    # Nothing is written to it, so it takes no memory.
    half = memoryview(np.empty(int(megabytes * 1e6 / 2), np.uint8))
    commands = written(Keys("w").parts("1-1", 2), {0: half, 1: half})
    assert [command[-2:] for command in commands] == [("PX", expiry_ms)] * 2
