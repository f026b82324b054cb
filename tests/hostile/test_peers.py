"""Servers whose replies are none: a typed error in every use, in time and with little memory.

A use of uses.py sends requests, and each of them gets a reply of another form. A forger in between passes on everything
else, so that the use gets that far. Other replies never end, or are errors with a text that must not be printed.
"""

import contextlib
import itertools
import logging
import resource
import time

import numpy as np
import pytest
import redis
import valkey
from click.testing import CliRunner
from support.forging import ENDLESS, FORMS, forger
from support.planting import PIECES
from support.rows import every_row
from support.selection import thorough
from uses import (
    CHANGING,
    READING,
    Use,
    attempt,
    check_text,
    commands,
    of_accumulator,
    of_parameters,
    of_training,
    on_a_loop,
    opening,
    pages,
    served,
)
from worlds import WORLDS, Rounds

import redisacc
from redisacc.tools.cli import COMMANDS, main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

# Seconds that a call tries to reach a server that answers something that cannot be a reply; and by how much it may be
# late on a busy machine.
SHORT, LATE = 0.2, 8.0
# What a process may grow by, in bytes: some replies of the largest size that is read.
GROWTH = 250 * 2**20
# The second, if the answer is not what the script returns, but arrives as a whole before the time is up.
REFUSALS = (redisacc.ServerUnavailableError, redisacc.CorruptDataError)


@pytest.fixture
def forging(real_server):
    with forger(real_server.port) as found:
        yield found


@pytest.fixture
def url(forging):
    return f"redis://127.0.0.1:{forging.port}/0"


# A reply of another form


def uses_of(world, others):
    """Yields each use: its name, and what opens a handle for it, and closes that."""
    of = of_accumulator if isinstance(world, Rounds) else of_parameters

    @contextlib.contextmanager
    def of_handle(name):
        with world.open() as handle:
            yield next(use for use in of(world, handle) if use.name == name)

    @contextlib.contextmanager
    def of_none(name):
        opened = []
        yield next(use for use in (*opening(world, opened), *others) if use.name == name)
        for handle in opened:
            handle.close()

    with world.open() as handle:
        names = [use.name for use in of(world, handle)]
    yield from ((name, lambda name=name: of_handle(name)) for name in names)
    yield from ((use.name, lambda name=use.name: of_none(name)) for use in (*opening(world, []), *others))


WHERE = ["published", "dense partitions", "trained", "weighted sparse in place", "tree parts", "dense inline"]


@pytest.mark.slow(keep="dense inline")
@pytest.mark.parametrize("name", WHERE)
def test_a_reply_of_another_form(
    name, forging, url, real_client, durations, caplog,
    everything, monkeypatch, tmp_path,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    world = WORLDS[name](real_client)
    world.where = url
    errors = []
    # Every use begins with another form.
    forms = itertools.cycle(FORMS)
    with served(url) as where:
        others = [*on_a_loop(world, url), *of_training(world), *commands(url, codes=range(7)), *pages(where)]
        for what, of in uses_of(world, others):
            world.restore()
            forging.passes()
            with of() as use:
                forging.passes()
                attempt(use, caplog)
            ends = [(command, {0, times - 1}) for command, times in forging.seen.items()]
            requests = [(command, at) for command, both in ends for at in (both if everything else {max(both)})]
            for command, at in [*requests, ("*", 0)]:
                for form in FORMS if everything else [next(forms)]:
                    world.restore()
                    forging.passes()
                    try:
                        with of() as use, durations(opening=SHORT, confirmation=SHORT, call=SHORT):
                            forging.forge(command, FORMS[form], at)
                            attempt(use, caplog)
                            forging.passes()
                    except (Exception, pytest.fail.Exception) as error:
                        error.add_note(f"{what}: {command} number {at + 1} was answered with {form}")
                        errors.append(error)
        forging.passes()
    if errors:
        raise ExceptionGroup("replies that are not refused", errors)


def test_every_command_is_tried():
    """But for those that send nothing, start a server of their own, or only write what applies and reducers do."""
    offline = {"acl", "completion", "demo", "run", "server", "apply", "restore", "reduce"}
    there = {words[0] for words in (*READING, *CHANGING)} | {"serve"}
    assert there | offline == set(COMMANDS)


# Replies without end


@contextlib.contextmanager
def bounded():
    """Checks that the block takes neither much longer than a call may, nor much memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert time.monotonic() - started < SHORT + LATE
    # Of Linux in KiB, of macOS in bytes, which makes this check weaker there.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH


@pytest.fixture
def short(durations):
    durations(opening=SHORT, handshake=SHORT, call=SHORT)


USUAL = [("a huge >", True), ("a huge *", False), ("a string without end", True), ("a byte now and then", False)]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("answer", "greets"), thorough(itertools.product(ENDLESS, (True, False)), usual=USUAL))
def test_an_opening_ends_in_time(forging, url, answer, greets):
    forging.forge("*", ENDLESS[answer])
    forging.greets = greets
    message = rf"127.0.0.1:{forging.port}|script open replied"
    with bounded(), pytest.raises(REFUSALS, match=message) as failure:
        # The timeout of a handshake is part of what redisacc sets, and too long for a test of silence.
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=f"{url}?socket_timeout={SHORT}")
    check_text(str(failure.value), longest=1000)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("answer", thorough(ENDLESS, usual=["a huge ~"]))
@pytest.mark.parametrize("client", [redis.Redis, valkey.Valkey])
def test_a_client_of_the_users_is_no_way_around(forging, answer, client):
    """But for the handshake, which is the client's own affair."""
    forging.forge("*", ENDLESS[answer])
    with (
        client(port=forging.port, socket_timeout=5, protocol=2) as where,
        bounded(),
        pytest.raises(REFUSALS),
    ):
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=where)


@pytest.mark.parametrize("answer", thorough(ENDLESS, usual=["a byte now and then"]))
def test_calls_end_in_time(durations, forging, url, open_accumulator, real_client, answer):
    acc = open_accumulator("dense", "float32", [1], "w", redis=f"{url}?socket_timeout={SHORT}")
    acc.apply_grad(np.ones(1))
    calls = [lambda: acc.apply_grad(np.ones(1)), acc.num_accumulated]
    if "without end" not in answer:
        # Gradients may be large: such an answer is cut off too, but not before 1 GiB.
        calls.append(acc.peek)
    forging.forge("*", ENDLESS[answer])
    with durations(handshake=SHORT, call=SHORT):
        for call in calls:
            with bounded(), pytest.raises(REFUSALS):
                call()
    forging.passes()
    assert acc.num_accumulated() == 1


@pytest.mark.usefixtures("short")
def test_an_error_says_what_came_and_where(forging, url):
    forging.forge("*", b"*123456789\r\n")
    message = "127.0.0.1:[0-9]+/0 .*an array of 123456789 elements in reply to EVALSHA"
    with pytest.raises(redisacc.ServerUnavailableError, match=message):
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)


# Errors with a text


class OwnConnection(redis.Connection):
    """A connection of the user's own: redis-py reads its replies, and makes its own errors of them."""


@pytest.mark.usefixtures("short")
@every_row("own", [False, True])
@every_row("code", ["ERR", "WRONGPASS", "NOPERM", "OOM", "WRONGTYPE", "LOADING", "@", ""])
def test_texts_of_errors(forging, url, caplog, code, own):
    text = b"".join(PIECES).replace(b"\r", b"").replace(b"\n", b"")
    caplog.set_level(logging.DEBUG, "redisacc")
    forging.forge("*", b"-%s %s%s\r\n" % (code.encode(), text, b"x" * 10_000))
    forging.greets = own
    pool = redis.ConnectionPool(connection_class=OwnConnection, host="127.0.0.1", port=forging.port)
    with redis.Redis(connection_pool=pool) as client:
        where = client if own else f"{url}?protocol=2"
        use = Use("open", lambda: redisacc.ConditionalAccumulator("float32", [1], "w", redis=where))
        assert attempt(use, caplog)[0]
    pool.disconnect()
    if not own:
        found = CliRunner().invoke(main, ["ls", "--redis", f"{url}?protocol=2"])
        # A server that loads its data will answer.
        assert (found.exit_code, found.stdout) == (6 if code == "LOADING" else 1, "")
        # A line for each attempt.
        for line in found.output.splitlines():
            check_text(line)
