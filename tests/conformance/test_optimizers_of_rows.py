"""A training whose gradients are rows ends where torch's optimizer of rows was recorded to end."""

import numpy as np
import pytest
from optimizer_cases import DTYPES, SPARSE, rows, table
from our_optimizers import distance
from support.selection import thorough
from test_optimizers import BOUNDS, EPS_ELSEWHERE, RECORDED, decoded

import redisacc
from redisacc import optim

pytestmark = pytest.mark.servers("valkey")


@pytest.mark.parametrize("name", thorough(SPARSE, usual=()))
def test_a_training_has_lazy_state_as_in_torch(real_client, background, name):
    kind, _, options = SPARSE[name]
    optimizer = getattr(optim, kind)(**options)
    given = list(zip(*map(rows, DTYPES), strict=True))
    begin = {dtype: table(dtype) for dtype in DTYPES}

    def work():
        with redisacc.Worker("rows", redis=real_client) as worker:
            for step, _ in worker.steps():
                worker.apply(dict(zip(DTYPES, given[step], strict=True)))

    with redisacc.Chief(
        "rows", begin, workers=1, optimizer=optimizer, accumulator={"sparse": DTYPES}, redis=real_client
    ) as chief:
        crew = background(work)
        for _ in chief.updates(until=len(given)):
            pass
        crew.result(20)
        found, state = chief.latest()[1], chief.latest_state()[1]
        chief.delete()
    assert state["updates"] == len(given) == 1000
    for dtype in DTYPES:
        arrays = [np.ravel(tree[dtype]) for tree in (found, *(state[slot] for slot in optimizer.slots))]
        bound = BOUNDS.get(name, EPS_ELSEWHERE / np.finfo(dtype).eps)
        assert distance(arrays, decoded(RECORDED[f"{name} {dtype}"], dtype)) <= bound
