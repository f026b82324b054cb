"""What people do with stored data: every call of the public API, every command, the exporter and the dashboard."""

import asyncio
import contextlib
import functools
import json
import logging
import re
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import redis
from click.testing import CliRunner
from support.exporter import Exporter
from support.planting import raw_text
from worlds import Published, Rounds, Trained, Weighted

import redisacc
import redisacc.asyncio
from redisacc import raw_ops
from redisacc.tools.cli import main


class Use(NamedTuple):
    """Something that people do.

    Attributes:
        name: its name.
        call: does it, and returns what it finds.
        writes: whether it may change something.
        after: what is read after it has succeeded.
    """

    name: str
    call: Callable[[], Any]
    writes: bool = False
    after: Callable[[], Any] | None = None


class Refused(Exception):
    """A command, a page or a script has said that it cannot do something."""


LONGEST, SLOWEST = 2000, 20.0


def check_text(text, *, longest=LONGEST):
    """Checks that a message can be printed, and is short."""
    assert raw_text(text) == []
    assert len(text) < longest


def attempt(use, caplog):
    """Does it. Returns whether it was refused, and what it found, or the kind of the error.

    Raises:
        AssertionError: it takes long, or an error, its causes or what is logged cannot be printed.
    """
    began, error, found = time.monotonic(), None, None
    try:
        found = use.call()
    except (redisacc.RedisAccError, Refused) as refusal:
        error = refusal
    assert time.monotonic() - began < SLOWEST
    if error is not None:
        check_text(str(error))
        assert raw_text("".join(traceback.format_exception(error))) == []
    for record in caplog.records:
        if record.name == "redisacc":
            check_text(record.getMessage())
        # A thread or a task that fails is only logged.
        assert record.name == "redisacc" or record.levelno < logging.ERROR, record.getMessage()
    caplog.clear()
    return error is not None, type(error) if error is not None else found


# Attributes of `info()` that depend on no clock and no name.
NUMBERS = (
    "global_step", "num_accumulated", "applied", "stale", "repeated", "duplicates", "takes",
    "buffered_bytes", "buffer_limit", "once_per_worker", "max_staleness", "staleness", "total_weight", "quorum",
    "created_at",
)  # fmt: skip


def bits(value):
    """Returns a value so that two compare equal only if all their numbers have the same bits."""
    match value:
        case np.ndarray() | np.generic():
            return value.dtype.str, value.shape, value.tobytes()
        case redisacc.IndexedSlices():
            return bits([value.indices, value.values])
        case dict():
            return {key: bits(item) for key, item in value.items()}
        case list() | tuple():
            return [bits(item) for item in value]
        case redisacc.Round():
            return bits([value.gradient, value.num_accumulated, value.global_step])
    return repr(value) if isinstance(value, float) else value


def of_accumulator(world, handle):
    """Yields what people do with a handle of an accumulator."""

    def info():
        found = handle.info()
        # The others are texts, and what is only shown.
        return [bits(getattr(found, name)) for name in NUMBERS]

    def take_block():
        with handle.take(1, timeout=0) as taken:
            return bits(taken)

    def recover():
        with handle.recover() as taken:
            return bits(taken)

    def events():
        with handle.events(timeout=0) as found:
            # Those of earlier uses may still arrive.
            assert all(event.kind for event in found)

    def after():
        return bits(handle.peek())

    yield Use("info", info)
    yield Use("peek", after)
    yield Use("num_accumulated", handle.num_accumulated)
    yield Use("global_step", handle.global_step)
    yield Use("quorum", handle.quorum)
    yield Use("wait_for_step", lambda: handle.wait_for_step(10**9, timeout=0))
    yield Use("events", events)
    yield Use("apply", lambda: bool(world.apply(handle)), True, after)
    yield Use("take", lambda: bits(handle.take_grad(1, timeout=0)), True, after)
    yield Use("take a block", take_block, True, after)
    yield Use("take a quorum", lambda: bits(handle.take_grad(timeout=0)), True, after)
    yield Use("recover", recover, True, after)
    yield Use("set_global_step", lambda: handle.set_global_step(9), True, after)
    yield Use("set_quorum", lambda: handle.set_quorum(least=1), True, after)
    yield Use("delete", handle.delete, True)


def of_parameters(world, handle):
    """Yields what people do with a handle of parameters."""

    def latest():
        return bits(handle.latest())

    def is_complete():
        if not handle.is_complete():
            raise Refused

    yield Use("step", handle.step)
    yield Use("latest", latest)
    yield Use("latest_state", lambda: bits(handle.latest_state()))
    yield Use("finished", handle.finished)
    yield Use("is_complete", is_complete)
    yield Use("history", lambda: repr(handle.history()))
    yield Use("wait", lambda: bits(handle.wait(-(2**62), timeout=0)))
    if isinstance(world, Published):
        yield Use("publish", lambda: world.publish(handle, 7), True, latest)
        rows = {"table": [1, 7], "used": [2]}
        yield Use("publish rows", lambda: world.publish(handle, 3, changed=rows), True, latest)
    yield Use("finish", handle.finish, True, latest)
    yield Use("delete parameters", handle.delete, True)


def opening(world, opened):
    """Yields how people open something; the handles are put into a list."""

    def of_text():
        return raw_ops.AccumulatorNumAccumulated(handle="redisacc:{w}", redis=world.where)

    yield Use("open", lambda: opened.append(world.open()))
    if isinstance(world, Rounds):
        yield Use("a handle that is a text", of_text)
        yield Use("open as it is", lambda: _peek_blocking(world))
        yield Use("another kind", lambda: redisacc.ConditionalAccumulator("int8", [7], "w", redis=world.where))


def of_training(world):
    """Yields what a chief and a worker do."""

    def lead():
        with world.lead() as chief, closed_after(chief):
            return next(iter(chief.updates(until=3)), None)

    def work():
        with redisacc.Worker("w", number=0, redis=world.where) as worker, closed_after(worker):
            next(iter(worker.steps()), None)

    def after():
        with world.open() as parameters:
            return bits(parameters.latest())

    if isinstance(world, Trained):
        yield Use("lead", lead, True, after)
        yield Use("work", work, True, after)
    elif isinstance(world, Weighted):
        yield Use("wait for a chief", work, True)


def on_a_loop(world, url):
    """Yields what people do on an event loop."""
    if isinstance(world, Rounds):
        yield Use("asyncio", lambda: asyncio.run(_peek(world, url)))
    else:
        yield Use("asyncio parameters", lambda: asyncio.run(_latest(url)))


@contextlib.contextmanager
def closed_after(handle):
    """Closes a chief or a worker that still waits after a while."""
    timer = threading.Timer(0.5, handle.close)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _peek_blocking(world):
    with world.kind(*world.schema, "w", redis=world.where) as acc:
        return bits(acc.peek())


async def _latest(url):
    async with redisacc.asyncio.Parameters("w", redis=url) as parameters:
        return bits(await parameters.latest())


async def _peek(world, url):
    kind = getattr(redisacc.asyncio, world.kind.__name__)
    async with kind(*world.schema, "w", redis=url) as acc:
        return bits(await acc.peek())


# Commands that only read, and those that change something.
READING = (
    ("ls",), ("ls", "--json"), ("show", "w"), ("show", "w", "--json"), ("show", "w", "--index", "1"),
    ("show", "w", "--index", "1", "--json"), ("watch", "-n", "1"), ("watch", "-n", "1", "--json"),
    ("take", "w", "--recover"),
    ("doctor", "--fix", "--dry-run"), ("doctor", "--fix", "--dry-run", "--json"), ("doctor",),
    ("watch", "w", "--events", "-n", "1", "--timeout", "0"),
    ("checkpoint", "w", "out.safetensors"),
)  # fmt: skip
CHANGING = (
    ("finish", "w"), ("set", "w", "least=2"), ("set", "w", "step=1", "--yes"), ("set", "w", "--forget", "ann"),
    ("take", "w", "1", "--timeout", "0", "--discard", "--yes"),
    ("take", "w", "1", "--timeout", "0", "--output", "out.npz"),
    ("take", "w", "--recover", "--output", "out.npz"), ("take", "w", "--recover", "--discard", "--yes"),
    ("doctor", "--fix", "--yes"),
    ("rm", "w", "--yes"),
)  # fmt: skip
# Reads a whole row if it is summed in place. Of other gradients, it looks at some bytes only.
EXACT = ("show", "w", "--index", "1", "--json")


def commands(url, *, in_place=False, codes=(0, 1, 2, 3)):
    """Yields every command of the command line that looks at one name, or at all of them."""
    for words in (*READING, *CHANGING):
        exact = in_place and words == EXACT
        # Only a take can time out.
        may = (*codes, 4) if words[0] == "take" else codes
        call = functools.partial(run, words, url, exact=exact, codes=may)
        yield Use(" ".join(words), call, words in CHANGING)


def run(words, url, *, exact, codes):
    """Runs a command. Returns what it prints if that is the same each time, as `exact` says.

    Raises:
        Refused: it ends with an error.
        AssertionError: its output or its exit code is none that a command may have.
    """
    result = CliRunner().invoke(main, [*words, "--redis", url])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    # What is there may be no such accumulator, or one of another version.
    assert result.exit_code in codes, result.output
    assert raw_text(result.stdout_bytes) == []
    assert raw_text(result.stderr_bytes) == []
    # An error inside a script, which did not expect what it found.
    assert "attempt to" not in result.stderr
    assert len(result.stderr) < 3000
    if result.exit_code:
        assert result.stderr.strip() or words[0] == "doctor", result.output
        raise Refused(result.stderr)
    if "--json" in words:
        for line in result.stdout.splitlines() if words[0] == "watch" else [result.stdout]:
            json.loads(line)
    return result.stdout if exact else None


@contextlib.contextmanager
def served(url):
    """Runs `redisacc serve` for a server. Yields where it is."""
    one = Exporter(url)
    try:
        yield one.url.rstrip("/")
    finally:
        err = one.stop()
        # Errors about what it could not show are on standard error.
        assert (raw_text(err), "Traceback" in err) == ([], False), err


def pages(where):
    """Yields what monitors show: the metrics for Prometheus, and the data of the page."""
    yield Use("metrics", lambda: _page(f"{where}/metrics"))
    yield Use("page", lambda: _update(f"{where}/updates?name=w"))


def _page(address):
    try:
        with urllib.request.urlopen(address, timeout=20) as page:
            text = page.read()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from None
    assert raw_text(text) == []


def _update(address):
    with urllib.request.urlopen(address, timeout=20) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                # JSON has no control characters but escaped ones.
                assert re.search(rb"[\x00-\x09\x0b-\x1f]", line) is None
                json.loads(line.removeprefix(b"data: "))
                return


def index_script(client, script):
    """Runs `lua/inspect/index.lua` as its page says.

    Raises:
        Refused: it ends with an error.
    """
    try:
        return client.eval(script, 1, "redisacc:{w}", "1")
    except redis.ResponseError as error:
        raise Refused(str(error)) from None
