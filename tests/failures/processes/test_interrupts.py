"""Signals at any moment: the caller of an apply can tell which gradients were counted, and no take loses a round."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import redis
from support.proxy import Fault
from support.selection import thorough

import redisacc

PROGRAM = Path(__file__).with_name("interrupted_worker.py")
TAKER = Path(__file__).with_name("interrupted_taker.py")


# What signal handlers raise. Calls know all but the first from sockets, where they mean that the connection is broken.
pytestmark = [pytest.mark.usual(storage="in_place"), pytest.mark.servers("valkey")]

RAISED = ("KeyboardInterrupt", "TimeoutError", "ConnectionResetError", "OSError")


@pytest.mark.slow(keep="2048")
@pytest.mark.parametrize(
    ("limit", "size", "kind"),
    thorough(
        [(*stored, kind) for stored in [(2048, 4), (0, 4), (0, 20_000)] for kind in RAISED],
        usual=[
            (2048, 4, "KeyboardInterrupt"),
            (0, 4, "TimeoutError"),
            (0, 20_000, "KeyboardInterrupt"),
        ],
    ),
)
def test_after_any_interrupt_the_caller_knows_what_was_counted(
    real_server, open_dense, background, everything, limit, size, kind
):
    acc = open_dense("float32", [size], "interrupted")
    draws = random.Random(size + limit)
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(PROGRAM), real_server.url, str(limit), str(size), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            interrupts = unreturned = 0
            # Until one has come between the server's count and the return: without settle(), the worker would have to
            # guess.
            while interrupts < (150 if everything else 15) or not unreturned:
                interrupts += 1
                assert interrupts < 1000
                print(file=worker.stdin, flush=True)
                assert worker.stdout.readline() == "go\n"
                time.sleep(draws.uniform(0, 0.004))
                worker.send_signal(signal.SIGINT)
                said = worker.stdout.readline()
                assert said, worker.stderr.read()
                returned, applied, stale, unknown = map(int, said.split())
                info = acc.info()
                assert (applied, stale, unknown) == (info.applied, info.stale, 0)
                unreturned += applied + stale - returned
                if info.buffered_bytes > 10_000_000:
                    acc.take_grad(1)
                    acc.set_global_step(0)
            worker.stdin.close()
            assert worker.wait(30) == 0
        finally:
            worker.kill()
    # Nothing arrives late.
    assert (applied, stale) == (acc.info().applied, acc.info().stale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "partitions", "kind"),
    thorough(
        [(*stored, kind) for stored in [(2048, 0), (0, 0), (0, 3)] for kind in RAISED],
        usual=[(2048, 0, "KeyboardInterrupt"), (0, 3, "TimeoutError")],
    ),
)
def test_takes_that_are_interrupted_at_any_moment_lose_no_round(real_server, everything, limit, partitions, kind):
    number = 400 if everything else 100
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", TAKER, real_server.url, str(limit), str(partitions), str(number), kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    received, interrupted = json.loads(done.stdout)
    assert received == [1] * number
    assert 0 < interrupted < number


# The scripts that count a gradient.
COUNTS = ("apply", "commit")


class Interrupt(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def acc(open_dense_stored, proxy):
    acc = open_dense_stored("float32", [2], "interrupted", redis=proxy.where)
    yield acc
    with contextlib.suppress(redisacc.NotFoundError, redisacc.CancelledError):
        acc.delete()


@pytest.fixture
def interrupted(proxy):
    """Interrupts the call in its block when it sends one of some scripts: before the server gets it, or executed."""

    def handler(*_):
        raise Interrupt

    @contextlib.contextmanager
    def interrupted(when, names=COUNTS):
        armed, over, cut = [True], threading.Event(), threading.Event()

        def interrupt():
            if not armed:
                return
            armed.clear()
            # What is held never arrives, nor does another copy.
            proxy.refuses = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            assert over.wait(20)
            proxy.cut_all()
            cut.set()

        for name in names:
            (proxy.before if when == "before" else proxy.after)(name, interrupt)
        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(Interrupt):
                yield
        finally:
            armed.clear()
            over.set()
            signal.signal(signal.SIGUSR1, previous)
        assert cut.wait(20)
        proxy.refuses = False

    return interrupted


def test_each_thread_has_its_own_tally(acc, background):
    for _ in range(2):
        acc.apply_grad([1, 1])
    assert background(
        lambda: (acc.apply_grad([1, 1], local_step=-1), acc.settle())[1]
    ).result() == redisacc.types.Tally(0, 1, 0, 0)
    assert acc.settle() == redisacc.types.Tally(2, 0, 0, 0)


def test_what_cannot_be_learnt_any_more_is_counted_as_unknown(acc, interrupted):
    acc.apply_grad([1, 1])
    with interrupted("after"):
        acc.apply_grad([1, 1])
    acc.delete()
    assert acc.settle() == redisacc.types.Tally(1, 0, 0, 1)


def test_a_silent_server_leaves_the_request_open(acc, interrupted, proxy, durations):
    with interrupted("after"):
        acc.apply_grad([1, 1])
    proxy.refuses = True
    with durations(call=0.4):
        with pytest.raises(redisacc.ServerUnavailableError):
            acc.settle()
        # Otherwise, this one would make the outcome of the other unknowable.
        with pytest.raises(redisacc.ServerUnavailableError):
            acc.apply_grad([2, 2])
    proxy.refuses = False
    assert acc.settle().applied == acc.info().applied == 1


def test_an_interrupted_settle_is_counted_once(acc, interrupted, proxy, durations):
    proxy.when_it_happens = lambda: setattr(proxy, "refuses", True)
    proxy.arm(Fault("request", 0, 0))
    with durations(call=0.4), pytest.raises(redisacc.OutcomeUnknownError) as unknown:
        acc.apply_grad([1, 1])
    proxy.refuses = False
    assert acc.settle() == redisacc.types.Tally(0, 0, 0, 0)
    with interrupted("after"):
        unknown.value.settle()
    assert acc.settle() == redisacc.types.Tally(1, 0, 0, 0)
    acc.apply_grad([2, 2])
    assert unknown.value.settle().outcome == "applied"
    assert acc.settle().applied == acc.info().applied == 2


def test_a_child_after_a_fork_settles_nothing_of_its_parent(acc, interrupted, fork):
    with interrupted("after"):
        acc.apply_grad([1, 1])
    assert fork(lambda: iter([acc.settle()])).value() == redisacc.types.Tally(0, 0, 0, 0)
    assert acc.settle() == redisacc.types.Tally(1, 0, 0, 0)


def test_a_handler_that_applies_in_the_middle_of_an_apply_disturbs_nothing(acc, proxy):
    handled = threading.Event()

    def handle(*_):
        acc.apply_grad(np.full(2, 8.0))
        handled.set()

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert handled.wait(20)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        proxy.before("apply", interrupt)
        assert acc.apply_grad([1, 1]).num_accumulated == 2
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert acc.settle() == redisacc.types.Tally(2, 0, 0, 0)


@pytest.fixture
def interrupted_take(acc, interrupted):
    """Applies a gradient and interrupts its take, before or after the acknowledgement is executed."""

    def take(when):
        acc.apply_grad([1, 2], local_step=2**62)
        with interrupted(when, ("acknowledge",)):
            acc.take_grad(1)

    return take


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_take_returns_the_round_of_an_interrupted_one(acc, interrupted_take, when, caplog):
    interrupted_take(when)
    assert (
        "had the round of step 0, with 1 gradients. The next take_grad() or recover() of this handle returns it"
        in caplog.text
    )
    assert len(acc.info().unacknowledged) == (when == "before")
    acc.apply_grad([4, 4], local_step=2**62)
    # Whatever the next take requires.
    assert acc.take_grad(5).tolist() == [1, 2]
    assert acc.info().unacknowledged == []
    assert acc.take_grad(1, timeout=0).tolist() == [4, 4]
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)


def test_rounds_that_are_kept_are_returned_in_their_order_each_to_one_task(acc, open_dense_stored, proxy, until):
    """Takes of several tasks are cancelled at the same time."""

    async def work():
        through = await redisacc.asyncio.ConditionalAccumulator("float32", [2], "interrupted", redis=proxy.where)
        over, held, takes = threading.Event(), [], []
        proxy.after("acknowledge", lambda: (held.append(1), over.wait(20)), times=3)
        for value in range(3):
            acc.apply_grad([value, value], local_step=2**62)
            takes.append(asyncio.create_task(through.take_grad(1)))
            while len(held) <= value:
                await asyncio.sleep(0.01)
        for take in takes:
            take.cancel()
        assert all(
            isinstance(error, asyncio.CancelledError) for error in await asyncio.gather(*takes, return_exceptions=True)
        )
        over.set()
        found = await asyncio.gather(*[through.take_grad(1, timeout=0) for _ in range(3)])
        assert [taken[0] for taken in found] == [0, 1, 2]
        with pytest.raises(redisacc.TakeTimeoutError):
            await through.take_grad(1, timeout=0)
        await through.close()

    asyncio.run(work())


def test_a_round_that_was_recovered_is_not_returned_as_well(acc, interrupted_take, open_dense):
    interrupted_take("before")
    with open_dense("float32", [2], "interrupted").recover() as recovered:
        assert recovered.gradient.tolist() == [1, 2]
    acc.apply_grad([4, 4], local_step=2**62)
    assert acc.take_grad(1, timeout=0).tolist() == [4, 4]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_handle_itself_may_recover_the_round_of_its_interrupted_take(acc, interrupted_take, when):
    interrupted_take(when)
    # A block that fails leaves the round to the next one.
    seen = []
    with pytest.raises(Interrupt), acc.recover() as recovered:  # noqa: PT012
        seen.append(recovered.gradient.tolist())
        raise Interrupt
    assert seen == [[1, 2]]
    with acc.recover() as recovered:
        assert recovered.gradient.tolist() == [1, 2]
    with acc.recover() as recovered:
        assert recovered is None
    assert acc.info().unacknowledged == []
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_leaves_the_round_of_an_interrupted_take_to_the_next_take_grad(acc, interrupted_take, when):
    interrupted_take(when)
    acc.apply_grad([4, 4], local_step=2**62)
    with acc.take(1) as taken:
        assert taken.gradient.tolist() == [4, 4]
    assert acc.take_grad(1, timeout=0).tolist() == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_after_a_fork_does_not_get_the_round_that_its_parent_keeps(acc, interrupted_take, fork, when):
    def take():
        with pytest.raises(redisacc.TakeTimeoutError):
            acc.take_grad(1, timeout=0)
        yield "nothing"

    interrupted_take(when)
    assert fork(take).value() == "nothing"
    assert acc.take_grad(1, timeout=0).tolist() == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_raw_operation_returns_the_round_of_an_interrupted_one(acc, proxy, interrupted, when):
    acc.apply_grad([1, 2])
    with redis.Redis.from_url(proxy.url) as client:
        options = {"handle": acc.accumulator_ref, "num_required": 1, "dtype": "float32", "redis": client}
        with interrupted(when, ("acknowledge",)):
            redisacc.raw_ops.AccumulatorTakeGradient(**options)
        assert redisacc.raw_ops.AccumulatorTakeGradient(**options).tolist() == [1, 2]


def test_an_interrupt_in_the_middle_of_a_message_takes_no_event_away(acc, open_dense, proxy):
    direct = open_dense("float32", [2], "interrupted")

    def handler(*_):
        raise Interrupt

    previous = signal.signal(signal.SIGUSR1, handler)
    with acc.events(timeout=20) as events:
        proxy.arm(Fault("reply", 0, 20, "hold"))
        proxy.when_it_happens = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        applies = threading.Timer(0.2, direct.apply_grad, [[1, 1]])
        applies.start()
        try:
            with pytest.raises(Interrupt):
                next(events)
        finally:
            signal.signal(signal.SIGUSR1, previous)
            proxy.resume()
            applies.join()
        direct.apply_grad([2, 2])
        assert [next(events).num_accumulated for _ in range(2)] == [1, 2]
