"""Runs the program that measures what encodings cost, with few steps."""

import pytest
from running import Programs, output_of

from redisacc.embedded import Server


@pytest.mark.timeout(300)
def test_encoding_errors():
    with Server() as server, Programs(server.url) as programs:
        lines = output_of(programs.start("encodings.py", "--steps", "4"), 250).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [(row[0], row[1]) for row in cells] == [
        *(("digits", encoding) for encoding in ("float32", *["bfloat16"] * 2, *["int8"] * 2, "int8, error feedback")),
        *(("words", encoding) for encoding in ("float32", *["bfloat16"] * 2, *["int8"] * 2)),
    ]
    most = {"float32": 0, "bfloat16": 0.2, "int8": 2.0, "int8, error feedback": 2.0}
    for _, encoding, _, _, error, loss, _ in cells:
        # A share, in percent.
        assert 0 <= float(error.rstrip("%").replace("none", "0")) <= most[encoding]
        assert 0 < float(loss) < 10
