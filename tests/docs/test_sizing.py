"""The calculator of docs/guides/sizing.md, compared with the memory that servers report."""

import re

import numpy as np
import pytest
from pages import DOCS, blocks_of

import redisacc


@pytest.fixture(scope="module")
def round_bytes():
    if not DOCS.is_dir():
        pytest.skip("the documentation isn't part of an installation")
    names = {}
    exec(blocks_of(DOCS / "guides" / "sizing.md")[0].text, names)
    return names["round_bytes"]


def used(client):
    keys = [key for key in client.scan_iter(count=1000) if key != b"redisacc:names"]
    return sum(client.memory_usage(key, samples=0) or 0 for key in keys)


# Workers, rows of a gradient (0: dense), elements of a row, dtype, whether each gradient has rows of its own.
CASES = [
    (1, 10, 16, "float32", False),
    (16, 40, 16, "float32", True),
    (4, 1000, 16, "float32", True),
    (16, 0, 10, "float32", False),
    (4, 0, 300_000, "float32", False),
    (2, 0, 1_000_000, "float32", False),
]


@pytest.mark.parametrize(("workers", "rows", "width", "dtype", "own"), CASES)
def test_a_round_takes_what_the_page_says(
    real_client,
    round_bytes,
    workers,
    rows,
    width,
    dtype,
    own,
):
    itemsize = 0
    for worker in range(workers):
        options = {"redis": real_client, "worker": f"host-of-a-worker:{worker}"}
        if rows:
            with redisacc.SparseConditionalAccumulator(dtype, [10**6, width], "sizing", **options) as sparse:
                itemsize = sparse.dtype.itemsize
                indices = np.arange(rows) + (worker * rows if own else 0)
                values = np.ones((rows, width))
                sparse.apply_grad(indices, values.astype(sparse.dtype))
        else:
            with redisacc.ConditionalAccumulator(dtype, [width], "sizing", **options) as dense:
                itemsize = dense.dtype.itemsize
                dense.apply_grad(np.ones(width).astype(dense.dtype))
    said = round_bytes(
        workers,
        rows * width or width,
        rows,
        distinct=rows * workers if own else None,
        itemsize=itemsize,
    )
    is_used = used(real_client)
    assert is_used <= said
    # Nor much more than twice as much.
    assert said <= 2 * is_used + 6000


# Rows of the page's table: elements and rows of a gradient, and whether each has rows of its own.
TABLE = {
    "sparse 10x16, other rows in each": (160, 10, True),
    "sparse 100x64": (6400, 100, False),
    "sparse 10,000x64": (640_000, 10_000, False),
    "dense, 1 million elements": (10**6, 0, False),
    "dense, 25 million elements (a ResNet-50)": (25 * 10**6, 0, False),
}


def test_the_table_is_what_the_calculator_says(round_bytes):
    text = (DOCS / "guides" / "sizing.md").read_text()
    found = re.findall(r"^\| (.*?) \| (?:in place|buffered) \| (.*?) \|$", text, re.MULTILINE)
    assert [gradient for gradient, _ in found] == list(TABLE)
    for gradient, cells in found:
        elements, rows, own = TABLE[gradient]
        for workers, cell in zip((4, 16, 64), cells.split(" | "), strict=True):
            number, unit = cell.split()
            said = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
            distinct = workers * rows if own else None
            assert said == pytest.approx(round_bytes(workers, elements, rows, distinct=distinct), rel=0.12)
