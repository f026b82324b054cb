"""The calculator of docs/guides/sizing.md for a step, compared with what a server receives, sends and stores."""

import contextlib
import threading

import numpy as np
import pytest
from pages import DOCS, blocks_of
from support.training_options import grouped

import redisacc

WORKERS, STEPS, FIRST = 3, 14, 6
# float32: 2 MB, which is enough for reducers.
MODEL = {"a": np.zeros(300_000, np.float32), "b": np.zeros((400, 500), np.float32)}
NBYTES = sum(leaf.nbytes for leaf in MODEL.values())


@pytest.fixture(scope="module")
def page():
    if not DOCS.is_dir():
        pytest.skip("the documentation isn't part of an installation")
    names = {}
    for block in blocks_of(DOCS / "guides" / "sizing.md"):
        if block.text.startswith(("import math", "def step_bytes")):
            exec(block.text, names)
    return names


def work(client, number):
    gradient = {path: np.ones_like(leaf) for path, leaf in MODEL.items()}
    with redisacc.Worker("step", number=number, redis=client) as worker:
        for _ in worker.steps():
            worker.apply(gradient)


@contextlib.contextmanager
def reducer(client, wanted):
    if not wanted:
        yield
        return
    running = redisacc.Reducer("step", redis=client)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield
    finally:
        running.close()
        thread.join()


def loop_of(chief, loop):
    if loop == "updates":
        yield from chief.updates(until=STEPS)
        return
    for taken in chief.rounds(until=STEPS):
        gradient = taken.gradient
        # The state of momentum: one slot.
        state = {path: np.ones_like(leaf) for path, leaf in MODEL.items()}
        chief.publish({path: chief.parameters[path] - gradient[path] for path in MODEL}, state=state)
        yield chief.step


@pytest.fixture
def _reducers_in_time(durations):
    """Lets the chief wait for reducers, however slow this machine is: without them, other bytes move."""
    durations(sum_patience=2.0, without_reducer=0.01, longest_without_reducer=0.01)
    durations(least_patience=2.0, longest_patience=20.0)


@pytest.mark.slow
@pytest.mark.usefixtures("_reducers_in_time")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("reducers", [False, True], ids=["chief adds", "reducer"])
@pytest.mark.parametrize(
    ("loop", "slots", "encoding"),
    [("updates", 0, "float32"), ("updates", 1, "float32"), ("updates", 1, "bfloat16"), ("rounds", 1, "float32")],
)
def test_a_step_moves_and_stores_what_the_page_says(real_client, page, loop, slots, encoding, reducers):
    step_bytes = page["step_bytes"]
    options = {"optimizer": redisacc.optim.SGD(0.1, momentum=0.9 * slots)} if loop == "updates" else {}
    threads = [threading.Thread(target=work, args=(real_client, number)) for number in range(WORKERS)]
    moved = []
    stored = 0
    with (
        reducer(real_client, reducers),
        redisacc.Chief(
            "step", MODEL, workers=WORKERS, redis=real_client, encoding=encoding, **grouped(options)
        ) as chief,
    ):
        for thread in threads:
            thread.start()
        for step in loop_of(chief, loop):
            if step in (FIRST, STEPS - 1):
                info = real_client.info("stats")
                moved.append((info["total_net_input_bytes"], info["total_net_output_bytes"]))
            sizes = [real_client.memory_usage(key, samples=0) or 0 for key in real_client.scan_iter(count=1000)]
            stored = max(stored, sum(sizes))
        for thread in threads:
            thread.join()
        chief.delete()
    ways = step_bytes(
        NBYTES, WORKERS, loop=loop, reducers=reducers, parameters=0.5 if encoding == "bfloat16" else 1.0, slots=slots
    )
    for place, (before, after) in enumerate(zip(*moved, strict=True)):
        said = sum(nbytes for way, nbytes in ways.items() if way.endswith("to servers") == (place == 0))
        assert (after - before) / (STEPS - 1 - FIRST) == pytest.approx(said, rel=0.15), (
            ways,
            "in" if not place else "out",
        )
    said = page["stored_bytes"](NBYTES, WORKERS, parameters=0.5 if encoding == "bfloat16" else 1.0, slots=slots)
    assert stored <= said
