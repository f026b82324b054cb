"""Hostile text in every field of every key: no command, message, traceback or log record passes it on as it is.

Messages have a bounded length, every failure is typed, and what cannot be read can still be deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socketserver
import threading
import traceback

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from support.planting import COMMANDS, KINDS, TEXTS, Planted, apply_rows, open_kind, raw_text, trees
from support.selection import thorough
from support.terminal import written_to_terminal

import redisacc
from redisacc._handles.existing import open_existing
from redisacc._protocol.leases.crew import Crew
from redisacc._redis.connect import connect
from redisacc._redis.transport import Transport
from redisacc._training.crew_text import crew_text
from redisacc.cli import main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

LONGEST = 2000


@pytest.fixture(params=KINDS)
def planted(request, real_client, durations, clock):
    durations(call=0.2, continued_within=0.0)
    made = Planted(real_client, request.param)
    with clock.running():
        yield made
    with contextlib.suppress(redisacc.RedisAccError):
        made.acc.close()


def operations(client, planted):
    """Yields every operation of the public API, as functions without arguments.

    They are called on a new handle. If none can be opened, they are called on one that was opened before.
    """
    box = []

    yield lambda: box.append(open_kind(planted.kind, client, worker="bob"))
    yield lambda: redisacc.ConditionalAccumulator("float32", [100_000, 2], "w", redis=client)
    yield lambda: open_existing(planted.keys, redis=client).close()
    acc = box[0] if box else planted.acc
    yield from (acc.info, acc.peek, acc.num_accumulated, acc.global_step)
    yield lambda: apply_rows(acc, 1, 1)
    yield lambda: acc.wait_for_step(10**9, timeout=0)
    yield lambda: list(acc.events(timeout=0))
    yield lambda: acc.recover().__enter__()
    yield lambda: acc.take_grad(1, timeout=0)
    yield lambda: acc.set_global_step(1)
    yield acc.quorum
    yield lambda: acc.set_quorum(least=1)
    yield lambda: acc.take_grad(timeout=0)
    yield acc.delete
    if box:
        yield acc.close
    yield from parameter_operations(client)


def training_operations(client):
    """Yields what a training does: the leases of the crew, who is named in messages, and the ends of loops."""

    def work(number):
        with redisacc.Worker("w", number=number, redis=client, patience=0) as worker:
            for _ in worker.steps():
                break

    def lead():
        with redisacc.Chief("w", next(trees()), workers=1, redis=client, patience=0) as chief:
            for _ in chief.rounds(until=1):
                break

    crew = Crew(connect(client), "w", holder="three", who="me")
    yield lambda: work(None)
    yield lambda: work(0)
    yield lead
    yield crew.members
    yield lambda: check_message(crew_text(crew), "the text of messages")


def parameter_operations(client):
    box = []

    def open_it():
        box.append(redisacc.Parameters("w", redis=client))

    yield open_it
    if box:
        (parameters,) = box
        first, second = trees()
        yield from (parameters.step, parameters.latest, parameters.latest_state, parameters.finished)
        yield parameters.history
        yield lambda: parameters.wait(after=9, timeout=0)
        yield lambda: parameters.publish(second, 1, state={"momentum": np.zeros(3)})
        yield lambda: parameters.publish(first, 2, changed={"table": [0, 2]})
        yield parameters.delete


def check_message(text, where):
    assert raw_text(text) == [], where
    assert len(text) < LONGEST, where


def call(operation, where):
    """Calls it. If it fails, the error must be typed, printable and short, and so must the errors that caused it."""
    failure = None
    try:
        operation()
    except redisacc.RedisAccError as error:
        failure = error
    if failure is not None:
        check_message(str(failure), where)
        assert raw_text("".join(traceback.format_exception(failure))) == [], where


def selected(everything, places):
    """Every text in every place with --all; otherwise each place with one text, so that all texts have their turn."""
    texts = list(TEXTS.items())
    for number, place in enumerate(places):
        some = texts if everything else [texts[number % len(texts)]]
        for name, text in some:
            yield place, text, f"{name} as {place.how} of {place.key!r} {place.field!r}"


@pytest.mark.slow
def test_operations(everything, planted, real_client, caplog):
    caplog.set_level(logging.DEBUG, "redisacc")
    for place, text, where in selected(everything, list(planted.places())):
        planted.restore()
        place.plant(real_client, text)
        # The others are read by no other code than without a training.
        trains = place.key.decode() in (planted.keys.crew, planted.keys.record, planted.parameter_keys.record)
        for operation in itertools.chain(
            training_operations(real_client) if trains else (), operations(real_client, planted)
        ):
            call(operation, where)
        for record in caplog.records:
            if record.name == "redisacc":
                check_message(record.getMessage(), where)
        caplog.clear()


def run(words, url):
    result = CliRunner().invoke(main, [*words, "--redis", url])
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)
    # What was planted may be no such accumulator, or one of another version. Only a take can time out.
    assert result.exit_code in ((0, 1, 2, 3, 4) if words[0] == "take" else (0, 1, 2, 3)), words
    assert result.exit_code == 0 or result.stderr.strip(), words
    return result


@pytest.mark.slow
def test_commands_in_a_pipe(everything, planted, real_client, real_server):
    for number, (place, text, where) in enumerate(selected(everything, list(planted.places())[::-1])):
        planted.restore()
        place.plant(real_client, text)
        # Commands differ less than places do: in `make test`, every place gets a few of them.
        commands = COMMANDS if everything else COMMANDS[number % 8 :: 8]
        for words in commands:
            found = run(words, real_server.url)
            assert raw_text(found.stdout_bytes) == [], (words, where)
            check_message(found.stderr, (words, where))
            if words[0] in ("ls", "show", "gc", "watch") and "--yes" not in words:
                as_json = run((*words, "--json"), real_server.url)
                assert raw_text(as_json.stdout_bytes) == [], (words, where)
                if as_json.exit_code == 0:
                    for line in [as_json.stdout] if words[0] != "watch" else as_json.stdout.splitlines():
                        json.loads(line)


def test_json_holds_the_real_text(planted, real_client, real_server):
    worker = TEXTS["utf8"].replace(b"\n", b"").decode()
    session, entry = next(iter(real_client.hgetall(planted.keys.sessions).items()))
    real_client.hset(planted.keys.sessions, session, entry.rpartition(b" ")[0] + b" " + worker.encode())
    facts = json.loads(run(("show", "w", "--json"), real_server.url).stdout)
    assert worker in [known["name"] for known in facts["known_workers"]]


TERMINAL = """
import json, sys
from redisacc._handles.existing import open_existing
from redisacc._redis.transport import Transport
from redisacc.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
print("the end")
"""


def on_a_terminal(commands):
    """Returns the bytes that commands write to a terminal, one after the other in one process."""
    return written_to_terminal(["-c", TERMINAL, json.dumps(commands)], lines=50)


@pytest.mark.slow
@pytest.mark.parametrize("planted", thorough(KINDS, usual=["sparse"]), indirect=True)
def test_commands_on_a_terminal(planted, real_client, real_server):
    # Everything that stays readable at once, so that the commands have the most to show.
    record = planted.keys.record
    for place in list(planted.places()):
        if place.how == "entry" or (place.how == "member" and place.key == b"redisacc:names"):
            place.plant(real_client, TEXTS["utf8"])
    for field in ("kind", "dtype", "reduction_type"):
        real_client.hset(record, field, "\x1b]0;pwn\apwn")
    real_client.hset(f"{record}:workers", TEXTS["utf8"], "1")
    words = [[*words, "--redis", real_server.url] for words in COMMANDS]
    words.append(["show", "w\x1b]0;pwn\apwn", "--redis", real_server.url])
    written = on_a_terminal(words)
    assert written.rstrip().endswith(b"the end"), written
    assert b"\\x1b]0;pwn\\x07pwn" in written
    assert raw_text(written, styled=True) == []


@contextlib.contextmanager
def answering(reply):
    """Yields the URL of a server that gives this answer to everything."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self):
            while self.request.recv(65536):
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}?protocol=2"
        finally:
            server.shutdown()
            thread.join()


REPLIES = ["ERR", "WRONGPASS", "NOPERM", "OOM", "WRONGTYPE", "LOADING", "@", ""]


@pytest.mark.parametrize("code", REPLIES)
def test_error_texts_of_the_server(monkeypatch, durations, code):
    durations(opening=0.3)
    text = b"".join(piece.replace(b"\r", b"").replace(b"\n", b"") for piece in TEXTS["binary"].splitlines())
    with answering(b"-%s %s%s\r\n" % (code.encode(), text, b"x" * 10_000)) as url:
        where = f"an error {code}"
        with pytest.raises(redisacc.RedisAccError) as failure:
            redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)
        check_message(str(failure.value), where)
        assert raw_text("".join(traceback.format_exception(failure.value))) == [], where
        found = CliRunner().invoke(main, ["ls", "--redis", url])
        # A server that loads its data will answer.
        assert (found.exit_code, found.stdout) == (6 if code == "LOADING" else 1, "")
        check_message(found.output, where)


def test_errors_of_redis_py_without_our_socket(real_server):
    # redis-py reads the replies of a connection that is not exactly one of its own, and makes its own errors of them.
    pool = redis.ConnectionPool(connection_class=OwnConnection, host="127.0.0.1", port=real_server.port)
    client = redis.Redis(connection_pool=pool)
    with pytest.raises(redisacc.ServerError) as failure:
        Transport(client).call("EVAL", "return redis.error_reply(ARGV[1])", 0, b"ERR " + TEXTS["utf8"])
    check_message(str(failure.value), "a client of another kind")
    assert raw_text("".join(traceback.format_exception(failure.value))) == []
    client.close()


class OwnConnection(redis.Connection):
    """A connection of the user's own."""
