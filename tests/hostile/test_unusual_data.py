"""Stored data that is unusual, and right; or whose texts people see: what they get is exact, and escaped."""

import itertools
import json

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from support.planting import TEXTS, raw_text
from support.terminal import written_to_terminal
from uses import CHANGING, READING
from worlds import HEAD, TREE, Rounds, Weighted

import redisacc
from redisacc.tools.cli import main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]


@pytest.mark.parametrize("parts", [[76], [16, 60], [8, 24, 44], [32, 3, 41], [31, 45], [36, 40], [1] * 76])
def test_a_gradient_that_is_cut_elsewhere(real_client, parts):
    world = Rounds(real_client, "tree", "parts")
    for identity, entry in real_client.hgetall(f"{HEAD}:buffered").items():
        keys = [f"{HEAD}:part:{identity.decode()}:{part}" for part in range(2)]
        data = b"".join(real_client.mget(keys))
        real_client.delete(*keys)
        for part, (start, stop) in enumerate(itertools.pairwise(np.cumsum([0, *parts]).tolist())):
            real_client.set(f"{HEAD}:part:{identity.decode()}:{part}", data[start:stop])
        place, _, header = entry.partition(b" ")
        header = msgpack.packb({**msgpack.unpackb(header), "parts": parts})
        real_client.hset(f"{HEAD}:buffered", identity, place + b" " + header)
    with world.open() as acc:
        found = acc.take_grad(2, timeout=5)
    assert found["d"].tolist() == [[1, 1], [1, 1]]
    assert found["i"].tolist() == TREE["i"]
    assert found["s"].values.tolist() == [[1, 1], [2, 2]]


def test_any_bytes_in_blocks_are_numbers(real_client):
    """-128 is no step that redisacc writes, but a number like any other. The padding of the last block is ignored."""
    world = Rounds(real_client, "int8", "inline")
    block = np.array([0.5], "<f4").tobytes() + b"\x80" * 256
    for identity in real_client.hkeys(f"{HEAD}:inline"):
        real_client.hset(f"{HEAD}:inline", identity, 3 * block)
    with world.open() as acc:
        assert (acc.take_grad(2) == -64).all()


def test_lengths_that_agree_with_each_other_but_not_with_the_data(real_client):
    world = Rounds(real_client, "int8", "inline")
    ((identity, entry), _) = real_client.hgetall(f"{HEAD}:buffered").items()
    header = msgpack.packb({**msgpack.unpackb(entry.partition(b" ")[2]), "sections": [["int8", [2**40]]]})
    real_client.hset(f"{HEAD}:buffered", identity, b"0 " + header)
    real_client.hset(HEAD, "round_shape", f"[{2**40}]")
    with world.open() as acc, pytest.raises(redisacc.CorruptDataError, match=r"redisacc:{w}:"):
        acc.peek()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("format", "have format 'future' .*: delete them with the version that published them"),
        ("encoding", "are stored with the encoding 'future', .*: read them with the version that published them"),
    ],
)
def test_parameters_of_another_version(open_parameters, real_client, field, message):
    open_parameters("w").publish(np.ones(3), 0)
    real_client.hset(f"{HEAD}:parameters", field, "future")
    with pytest.raises(redisacc.CorruptDataError, match=message):
        open_parameters("w").latest()


def test_json_holds_the_real_text(real_client, real_server):
    Rounds(real_client, "dense", "in place")
    worker = TEXTS["utf8"].replace(b"\n", b"").decode()
    ((session, entry),) = real_client.hgetall(f"{HEAD}:sessions").items()
    real_client.hset(f"{HEAD}:sessions", session, entry.rpartition(b" ")[0] + b" " + worker.encode())
    shown = CliRunner().invoke(main, ["show", "w", "--json", "--redis", real_server.url])
    assert worker in [known["name"] for known in json.loads(shown.stdout)["known_workers"]]


TERMINAL = """
import json, sys
from redisacc.tools.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
print("the end")
"""


@pytest.mark.slow
def test_a_terminal(real_client, real_server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Everything that stays readable at once, so that the commands have the most to show.
    Weighted(real_client, "sparse", "in place")
    text = TEXTS["utf8"]
    for key in ("sessions", "takers", "taken", "crew"):
        for field, entry in real_client.hgetall(f"{HEAD}:{key}").items():
            real_client.hset(f"{HEAD}:{key}", field, entry.rpartition(b" ")[0] + b" " + text)
    real_client.sadd("redisacc:names", text)
    for field in ("kind", "dtype", "reduction_type"):
        real_client.hset(HEAD, field, "\x1b]0;pwn\apwn")
    real_client.hset(f"{HEAD}:workers", text, "1")
    words = [[*words, "--redis", real_server.url] for words in (*READING, *CHANGING)]
    words.append(["show", "w\x1b]0;pwn\apwn", "--redis", real_server.url])
    written = written_to_terminal(["-c", TERMINAL, json.dumps(words)], lines=50)
    assert written.rstrip().endswith(b"the end"), written
    assert b"\\x1b]0;pwn\\x07pwn" in written
    assert raw_text(written, styled=True) == []
