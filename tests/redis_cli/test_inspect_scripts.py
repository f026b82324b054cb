"""The scripts of lua/inspect: they print the sums that peek() divides, or name `redisacc show`."""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import msgpack
import numpy as np
import pytest
from redis.exceptions import ResponseError
from support.selection import thorough

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lua" / "inspect"
ROWS = 16
# The type of the elements of each dtype, and that of their sum.
TYPES = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.float16, np.float32),
    "bfloat16": (ml_dtypes.bfloat16, np.float32),
}


def run(client, script, *args):
    return [line.decode() for line in client.eval((FOLDER / f"{script}.lua").read_text(), 1, *args)]


def index_of(client, acc, *args):
    """The reply of index.lua as a dict: first word → the rest."""
    lines = run(client, "index", acc.accumulator_ref, *args)
    return dict(line.partition(" ")[::2] for line in lines)


def numbers(text, dtype):
    # Sums of narrow floats are printed as they are before a take rounds them to the dtype.
    elements, summed = TYPES[dtype]
    with np.errstate(over="ignore"):
        return np.array([float(word) for word in text.split()]).astype(summed).astype(elements)


def random_values(rng, dtype, shape):
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)
    special = rng.random(shape) < 0.1
    values[special] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 7e4, 3e38], special.sum())
    with np.errstate(all="ignore"):
        return values.astype(TYPES[dtype][0])


def same(left, right):
    """Bit for bit, but for the signs and payloads of NaNs."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    number = ~np.isnan(left)
    return np.array_equal(left, right, equal_nan=True) and np.array_equal(
        np.signbit(left[number]), np.signbit(right[number])
    )


# How gradients come to be stored: the in_place_limit of each handle that applies in turn, the bytes up to which a
# buffered one is inline, and whether the buffer has so little room that it must be compacted.
STORED = {
    "in_place": ([10**9], 65536, False),
    "inline": ([0], 65536, False),
    "parts": ([0], 0, False),
    "compacted": ([0], 65536, True),
    "compacted parts": ([0], 0, True),
    "mixed": ([10**9, 0, 0, 0], 300, True),
}


# The narrow types in one of these ways, and float32 in all of them.
DTYPES = ("float32", "float64", "float16", "bfloat16")
EVERY_WAY = [(dtype, stored) for dtype in DTYPES for stored in STORED]
USUAL = [
    *(("float32", stored) for stored in STORED),
    ("float64", "mixed"),
    ("float16", "inline"),
    ("bfloat16", "mixed"),
]


@pytest.fixture
def applied(client):
    """Applies gradients in turn by handles that store them in one of the ways. Returns the first handle."""

    def apply(opener, schema, stored, gradients, nbytes):
        limits, small, compacted = STORED[stored]
        # Enough for the sum, and little more.
        room = int(nbytes * 1.1) if compacted else 2**30
        accs = [
            opener(*schema, "w", limits=redisacc.Limits(limit, room, small), reduction_type="SUM") for limit in limits
        ]
        for number, gradient in enumerate(gradients):
            accs[number % len(accs)].apply_grad(*gradient)
        headers = [
            msgpack.unpackb(entry.partition(b" ")[2]) for entry in client.hvals(f"{accs[0].accumulator_ref}:buffered")
        ]
        assert any(header["gradients"] > 1 for header in headers) == compacted
        return accs[0]

    return apply


@pytest.mark.slow(keep="mixed")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize(("dtype", "stored"), thorough(EVERY_WAY, usual=USUAL))
def test_sparse_equals_peek(client, open_sparse, applied, dtype, stored):
    rng = np.random.default_rng([*dtype.encode(), *stored.encode()])
    rows = [rng.choice(ROWS - 1, rng.integers(0, 9), replace=False) for _ in range(40)]
    holders = np.bincount(np.concatenate(rows), minlength=ROWS)
    gradients = [(indices, random_values(rng, dtype, (len(indices), 2, 3))) for indices in rows]
    nbytes = ROWS * (16 + 6 * np.dtype(TYPES[dtype][1]).itemsize)
    acc = applied(open_sparse, (dtype, [ROWS, 2, 3]), stored, gradients, nbytes)
    look = acc.peek().gradient
    for index in range(ROWS):
        said = index_of(client, acc, index)
        assert (said["step"], said["gradients"], said["count"]) == ("0", "40", str(holders[index]))
        if holders[index] == 0:
            assert "sum" not in said
            continue
        expected = look.values[np.searchsorted(look.indices, index)]
        assert said["elements"] == "6 of 6"
        assert same(numbers(said["sum"], dtype), expected.reshape(-1)), (index, said, expected)
    one = int(np.flatnonzero(holders)[0])
    said = index_of(client, acc, f"{one},1", 2)
    assert said["elements"] == "2 of 3"
    assert same(numbers(said["sum"], dtype), look.values[np.searchsorted(look.indices, one)][1][:2])


@pytest.mark.servers("valkey")
@pytest.mark.parametrize(("dtype", "stored"), thorough(EVERY_WAY, usual=USUAL))
def test_dense_equals_peek(client, open_dense, applied, dtype, stored):
    rng = np.random.default_rng([*dtype.encode(), *stored.encode()])
    gradients = [(random_values(rng, dtype, (7, 90)),) for _ in range(12)]
    acc = applied(open_dense, (dtype, (7, 90)), stored, gradients, 7 * 90 * np.dtype(TYPES[dtype][1]).itemsize)
    look = acc.peek().gradient
    for where, most, expected in (
        ("", 1000, look.reshape(-1)),
        ("2", 90, look[2]),
        ("6,89", 1, look[6, 89:]),
        ("3", 16, look[3, :16]),
    ):
        said = index_of(client, acc, where, most)
        assert (said["count"], said["elements"].split()[0]) == ("12", str(len(expected)))
        assert same(numbers(said["sum"], dtype), expected), (where, said, expected)


@pytest.mark.every_server
def test_indices_beyond_doubles(client, open_sparse):
    """Two indices that are the same as doubles, and a gradient whose parts are many."""
    last = 2**63 - 1
    acc = open_sparse("float64", None, "w", limits=redisacc.Limits(in_place=0))
    acc.apply_grad([0, 2**53, 2**53 + 1, last - 1, last], [0.5, 1.0, 2.0, 3.0, 4.0])
    for index, value in ((2**53, "1"), (2**53 + 1, "2"), (last - 1, "3"), (last, "4"), (0, "0.5")):
        assert index_of(client, acc, index)["sum"] == value
    for index in (1, 2**53 + 2, last - 2):
        assert index_of(client, acc, index)["count"] == "0"
    with pytest.raises(ResponseError, match="above 2"):
        index_of(client, acc, last + 1)


def test_a_gradient_of_several_parts_is_searched_and_not_loaded(client, open_sparse, real_server):
    acc = open_sparse("float32", None, "w", limits=redisacc.Limits(buffer=2**30))
    indices = np.sort(np.random.default_rng(3).choice(10**9, 300_000, replace=False))
    values = np.random.default_rng(4).normal(size=(300_000, 20)).astype(np.float32)
    acc.apply_grad(indices, values)
    for place in (0, 1, 131_071, 131_072, 262_143, 262_144, 299_999, 123_456):
        said = index_of(client, acc, int(indices[place]), 20)
        assert same(numbers(said["sum"], "float32"), values[place])
    before = client.info("commandstats")["cmdstat_getrange"]["calls"]
    index_of(client, acc, int(indices[77_777]))
    # 19 guesses, and the values of the row, which may be in two parts.
    assert client.info("commandstats")["cmdstat_getrange"]["calls"] - before <= 19 + 2


def test_too_many_buffered_are_refused(client, open_sparse):
    acc = open_sparse("float32", [5], "w", limits=redisacc.Limits(in_place=0))
    for _ in range(200):
        acc.apply_grad([1], [1.0])
    assert index_of(client, acc, 1)["sum"] == "200"
    acc.apply_grad([1], [1.0])
    with pytest.raises(ResponseError, match=r"201 gradients are buffered.*: use `redisacc show NAME --index I`"):
        index_of(client, acc, 1)


@pytest.mark.forges
def test_what_is_left_to_show(client, open_dense):
    buffered, parts = redisacc.Limits(in_place=0), redisacc.Limits(in_place=0, inline=0)
    for dtype, limits, options, weight, message in (
        *((dtype, buffered, {}, 1, f"reads no elements of the dtype {dtype}") for dtype in ("int32", "complex64")),
        *(("float32", buffered, {"encoding": of}, 1, f"is encoded as {of}") for of in ("int8", "bfloat16")),
        ("float32", buffered, {}, 2, "have weights"),
        ("float32", parts, {}, 1, "in partitions, which no script can read"),
    ):
        acc = open_dense(dtype, [300], "w", limits=limits, **options)
        acc.apply_grad(np.ones(300, dtype), weight=weight)
        if limits is parts:
            client.hset("redisacc:{w}", "partitions", "0")
        with pytest.raises(ResponseError, match=f"{message}: use `redisacc show NAME --index I`"):
            index_of(client, acc, 1)
        client.flushall()


def test_a_tree_is_left_to_show(client, open_tree):
    acc = open_tree(
        {"a": redisacc.Sparse("float32", (9, 2)), "b": ("float32", ())},
        "w",
        mean=redisacc.Mean(missing="skip", rows="index"),
    )
    acc.apply_grad({"a": None, "b": 1})
    with pytest.raises(ResponseError, match="use `redisacc show NAME --leaf PATH --index I`"):
        index_of(client, acc, "b")
    lines = run(client, "summary", acc.accumulator_ref)
    assert lines[:3] == [
        "redisacc:{w}: tree float32 2 leaves MEAN by the gradients that have the leaf, "
        "of a row by those that held its index",
        "`redisacc show NAME --json` lists the leaves",
        "step 0, 1 gradients in this round",
    ]


def test_wrong_arguments_are_said(client, open_sparse):
    acc = open_sparse("float32", [5, 2], "w")
    acc.apply_grad([1], [[1.0, 2.0]])
    for message, *given in (
        ("needs an index", ()),
        ("whole numbers", ("x",), ("1,",), ("-1",)),
        ("whole numbers separated by commas, not [?]{2}evil", ("\x1b\u202eevil",)),
        ("1 to 1000", ("1", "0"), ("1", "1001"), ("1", "1.5")),
        ("coordinate 2 is outside a dimension of size 2", ("1,2",)),
        ("got 2 coordinates for 1 dimensions", ("1,1,1",)),
    ):
        for args in given:
            with pytest.raises(ResponseError, match=message):
                pytest.fail(f"{args} were accepted: {index_of(client, acc, *args)}")
    acc.delete()
    for script in ("summary", "index"):
        with pytest.raises(ResponseError, match="there is no accumulator"):
            run(client, script, "redisacc:{nowhere}", "1")


@pytest.mark.every_server
@pytest.mark.forges
def test_foreign_data_are_an_error_that_names_them(client, open_sparse):
    """tests/hostile tries all of them, and takes any error."""
    acc = open_sparse("float32", [5, 2], "w", limits=redisacc.Limits(in_place=0, inline=0))
    acc.apply_grad([1], [[1.0, 2.0]])
    client.delete(*client.keys("redisacc:{w}:part:*"))
    with pytest.raises(ResponseError, match="is gone, or too short"):
        index_of(client, acc, 1)
    acc = open_sparse("float32", [5, 2], "v", limits=redisacc.Limits(in_place=0))
    acc.apply_grad([1], [[1.0, 2.0]])
    client.delete("redisacc:{v}:inline")
    with pytest.raises(ResponseError, match="is gone, or has another length"):
        index_of(client, acc, 1)
    client.hset("redisacc:{v}:buffered", *client.hkeys("redisacc:{v}:buffered"), b"0 \xff")
    with pytest.raises(ResponseError, match="redisacc did not write"):
        index_of(client, acc, 1)


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli here")
@pytest.mark.servers("redis7", "redis62")
@pytest.mark.every_server
def test_the_page_shows_what_redis_cli_says(real_server, client, open_sparse, open_dense, open_tree, background, until):
    """Every command of docs/reference/redis-cli.md, with its output; ids and times of day aside."""
    steps, live = console_blocks()
    a, b, c = (
        open_sparse(
            "float32",
            [10000, 4],
            "embeddings",
            worker=f"worker-{n}",
            limits=redisacc.Limits(in_place=0 if n == 1 else None),
        )
        for n in range(3)
    )
    chief = open_sparse("float32", [10000, 4], "embeddings", worker="chief")
    bias = open_dense("float32", [100, 50], "bias")
    layers = [{"w": ("float32", (4, 3)), "b": ("float32", (3,))}]
    spec = {"embed": redisacc.Sparse("float32", (10000, 4)), "layers": layers, "steps": ("int64", ())}
    models = [open_tree(spec, "model", mean=redisacc.Mean(missing="skip"), worker=f"worker-{n}") for n in range(2)]
    for model, rows in zip(models, (([7, 42], np.ones((2, 4))), None), strict=True):
        layer = {"w": np.arange(12).reshape(4, 3), "b": [1, 2, 3]}
        model.apply_grad({"embed": rows, "layers": [layer], "steps": 1})
    for worker in (a, b, c):
        worker.apply_grad([7, 42], np.ones((2, 4)))
    a.take_grad(3)
    a.apply_grad([1], np.ones((1, 4)), local_step=1)
    left = chief.take(1)
    left.__enter__()
    c.apply_grad([1], np.ones((1, 4)), local_step=1)
    a.apply_grad([7, 42], [[1, 2, 3, 4], [0.5] * 4], local_step=2)
    b.apply_grad([42, 9000], [[1.5, 2.5, 3.5, 4.5], [1] * 4], local_step=2)
    take = background(chief.take_grad, 3, timeout=60)
    until(lambda: chief.info().waiting)

    lease = {"holder": "x", "who": "redis-1:4711", "stored": 12, "late": 1}
    reducer = "redisacc:{model}:reducer"
    client.hset(reducer, mapping=lease)
    client.pexpire(reducer, 600_000)
    sums = [f"redisacc:{{model}}:sum:5d0c1e7f9a3b42687c1f0e9d8b7a6954:{part}" for part in range(2)]
    for key in sums:
        client.set(key, b"part", px=600_000)

    assert len(steps) == 13
    for command, expected in steps:
        said = subprocess.run(
            redis_cli(command, real_server.url), capture_output=True, text=True, timeout=20, check=True, cwd=ROOT
        ).stdout
        # redis-cli adds an empty line where it writes plain text.
        assert masked(said.rstrip()) == masked(expected), command

    command, expected = live
    channel = "redisacc:{embeddings}:events"
    before = client.pubsub_numsub(channel)[0][1]
    with subprocess.Popen(redis_cli(command, real_server.url), stdout=subprocess.PIPE, text=True, cwd=ROOT) as listener:
        until(lambda: client.pubsub_numsub(channel)[0][1] > before)
        c.apply_grad([1], np.ones((1, 4)), local_step=1)
        c.apply_grad([1], np.ones((1, 4)), local_step=2)
        take.result()
        # Versions greet differently: "Reading messages...".
        lines = filter(lambda line: not line.startswith("Reading"), listener.stdout)
        said = list(itertools.islice(lines, len(expected.splitlines())))
        listener.kill()
    assert "".join(said).rstrip() == expected
    with chief.recover():
        pass
    chief.delete()
    bias.delete()
    models[0].delete()
    client.delete(reducer, *sums)


def console_blocks():
    """(command, output) of every command on the page, and last the one that listens."""
    page = (ROOT / "docs" / "reference" / "redis-cli.md").read_text()
    blocks = "\n".join(re.findall(r"```console\n(.*?)\n```", page, re.DOTALL))
    found = [part.partition("\n")[::2] for part in re.split(r"^\$ ", blocks, flags=re.MULTILINE)[1:]]
    *steps, live = [(command, output.rstrip()) for command, output in found]
    return steps, live


def redis_cli(command, url):
    words = shlex.split(command)
    # Into a pipe redis-cli would write as with --raw.
    return [words[0], "-u", url, *([] if "--raw" in words else ["--no-raw"]), *words[1:]]


def masked(text):
    """Returns the output without parts that differ each time; lists in the server's order are sorted."""
    text = re.sub(r"\b\d{13}-[0-9a-f]{16}-\d+\b", "TOKEN", text)
    text = re.sub(r"\b1[0-9]{12}\b", "TIME", text)
    text = re.sub(r"\b\d+\.\d s\b", "AGO", text)
    return sorted(re.sub(r"^\d+\) ", "", line) for line in text.splitlines())


def test_the_summary_says_what_is_unusual(client, open_dense, open_sparse, background, until):
    def summary(acc):
        return run(client, "summary", acc.accumulator_ref)

    acc = open_sparse("float64", [9, 1], mean=redisacc.Mean(rows="round"))
    assert "MEAN by the gradients of the round" in summary(acc)[0]
    options = {"staleness": redisacc.Staleness(3, weight="inverse_sqrt"), "mean": redisacc.Mean(by="count")}
    acc = open_dense("float32", [1], "w", worker="chief staleness=1:1 x", **options)
    acc.set_global_step(5)
    late = "gradients may be up to 3 steps late; steps:gradients in this round: "
    assert {late + "none", "recovered rounds: 0"} <= set(summary(acc))
    acc.apply_grad([1.0], 5)
    acc.apply_grad([1.0], 2, weight=3)
    client.hset("redisacc:{w}:workers", "\x1b[31mred\u009b", "7")
    assert "  ?[31mred?: 7" in summary(acc)
    takes = []
    for required in ({"min_weight": 4.5, "most": 3, "grace": 0}, {"most": 4, "grace": 100}, {"grace": 0.5}, {}):
        takes.append(background(acc.take_grad, 2, **required))
        until(lambda: len(acc.info().waiting) == len(takes))
    said = summary(acc)
    assert said[0] == "redisacc:{w}: dense float32 [1] MEAN by the number of the gradients"
    assert said[1] == "step 5, 2 gradients in this round with a weight of 2.5 of shape [1]"
    assert {late + "0:1,3:1", "weights by staleness: inverse_sqrt"} <= set(said)
    at, who = said.index("waiting takers: 4"), ": chief staleness=1:1 x"
    assert said[at + 1 : at + 5] == [
        "  2 of 2 with a weight of 4.5" + who,
        f"  2 of 2, or up to 4 within 100.0 s{who}",
        f"  2 of 2, or up to more within 0.5 s{who}",
        "  2 of 2" + who,
    ]
    acc.delete()
    for take in takes:
        with pytest.raises(redisacc.NotFoundError, match="accumulator"):
            take.result()
    acc = open_dense("float32", [1], "w", worker="chief")
    acc.apply_grad([1.0], weight=7)
    acc.take(1).__enter__()
    with acc.recover():
        (taken,) = [line for line in summary(acc) if line.startswith("  step 0 with")]
        assert re.fullmatch(r"  step 0 with 1 gradients of weight 7, granted .* ago to chief, token \S+", taken)
    client.rpush("redisacc:{w}:recovered", *["garbage"] * 30)
    said = summary(acc)
    start = said.index("recovered rounds: 31")
    assert " ago by chief, token " in said[start + 1]
    assert said[start + 2] == "  and 21 more"
    client.hset("redisacc:{w}", "incarnation", b"deleted:" + client.hget("redisacc:{w}", "incarnation"))
    assert "this accumulator is being deleted" in summary(acc)
