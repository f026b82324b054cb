"""The command line with made-up arguments and files: a documented exit code and short, printable output, or success.

The commands, their arguments and their options come from the command line itself, so that none is forgotten. Four of
them run until they are ended; only their arguments are parsed here.
"""

import contextlib
import io
import json
import pickle
import struct
import time
import zipfile

import click
import hypothesis.strategies as st
import numpy as np
import pytest
from click.testing import CliRunner
from support.planting import TEXTS as PLANTED
from support.planting import raw_text
from support.rows import every_row

import redisacc
from redisacc.tools.cli import COMMANDS, main

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]

GROUP = click.Context(main)
COMMANDS = {name: main.get_command(GROUP, name) for name in COMMANDS}
ONLY_PARSED = ("server", "demo", "serve")
EXIT_CODES = (0, 1, 2, 3, 4, 5, 6)
# As a shell has them, for a program that cannot be executed and for one that does not exist.
PROGRAM_CODES = (126, 127)

HOSTILE = [
    "", " ", "-", "--", "nan", "inf", "-inf", "0", "-1", "1", "2", "1.5", "1e300", "-1e300", "1e-320", "٣", "0x10",
    "1_0", "99999999999999999999", str(2**63), str(-(2**63)), str(2**64), "9" * 5000, "w", "s", "nowhere",
    "redisacc:{w}", "redisacc:{}", "redisacc:{\udcff}", "{", "}", "*", "[", "[^", "\\", "?" * 200, "x" * 5000,
    "\udce9", "日本 😀", "-w", "--json", "--help", "@x", "w\udcff\x1b",
    *(text.decode(errors="surrogateescape") for text in PLANTED.values()),
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12), st.integers().map(str), st.floats().map(str))
NAMES = st.one_of(st.sampled_from(["w", "s"]), st.sampled_from(["w", "s"]), TEXTS)


def npy(shape=(3,), dtype="<f4", fortran=False, data=b"\0" * 12, version=(1, 0), header=None):
    """An .npy whose header says what it likes."""
    text = (header or f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}").encode()
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data


def npz(members, compression=zipfile.ZIP_DEFLATED, claim=None):
    """An .npz whose members have these bytes, or say that they unpack to many more."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
        for member in archive.filelist if claim else ():
            member.file_size = claim
    return file.getvalue()


def saved(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


DENSE = npy(data=np.ones(3, "<f4").tobytes())
SPARSE = saved(indices=np.array([1, 3]), values=np.ones((2, 2), np.float32), shape=np.array([9, 2]))
FILES = {
    "dense": DENSE,
    "dense.npz": saved(gradient=np.ones(3, np.float32)),
    "sparse": SPARSE,
    "claims 373 GiB": npy((10**11,), data=b""),
    "claims 2^80": npy((2**40, 2**40), data=b""),
    "negative": npy((-1, 3)),
    "no bytes an element": npy((2**62,), "|V0", data=b""),
    "huge header": npy(header="{" + " " * 60_000 + "}"),
    "deep header": npy(header="(" * 9000),
    "minus header": npy(header="-" * 9000 + "1"),
    "version 2": npy(version=(2, 0)),
    "version 3": npy(version=(3, 0)),
    "version 9": npy(version=(9, 9)),
    "objects": npy(dtype="|O", data=pickle.dumps([1, 2, 3])),
    "pickle": pickle.dumps(np.ones(3)),
    "structure": npy(dtype=[("a\x1b]0;pwn\x07", "<f4")]),
    "bool shape": npy((True,)),
    "empty": b"",
    "magic": b"\x93NUMPY",
    "zip": b"PK",
    "empty zip": npz([]),
    "bomb": npz([("gradient.npy", DENSE)], claim=2**40),
    "wrong claim": npz([("gradient.npy", npy((10**12,), data=bytes(100)))]),
    "foreign": npz([(f"a\x1b]0;pwn\x07{n}.npy", b"") for n in range(50)]),
    "lzma": npz([("gradient.npy", DENSE)], zipfile.ZIP_LZMA),
    "bz2": npz([("gradient.npy", DENSE)], zipfile.ZIP_BZIP2),
    "text": npz([("gradient.npy", b"text")]),
    "scalar": npy((), data=b"\0\0\0\0"),
    "int": npy(dtype="<i8", data=bytes(24)),
    "big-endian": npy(dtype=">f4"),
    "complex": npy(dtype="<c16", data=bytes(48)),
    "time": npy(dtype="<M8[s]", data=bytes(24)),
}


def mutated(draw, data):
    """The data, mostly unchanged; sometimes with bytes changed, cut off, inserted or doubled."""
    how = draw(st.sampled_from(["as it is", "as it is", "changed", "cut", "longer", "doubled", "flipped"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "changed":
        return data[:at] + draw(st.binary(max_size=6)) + data[at + draw(st.integers(0, 6)) :]
    if how == "cut":
        return data[:at]
    if how == "longer":
        return data + draw(st.binary(min_size=1, max_size=9))
    if how == "doubled":
        return data + data
    if how == "flipped" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    return data


@st.composite
def files(draw):
    return mutated(draw, FILES[draw(st.sampled_from(sorted(FILES)))])


@st.composite
def arguments(draw):
    """A command, and words for it: mostly its own options and arguments, mostly with values that it may refuse."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    words = []
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Argument):
            if parameter.name in ("name", "names"):
                words += draw(st.lists(NAMES, max_size=2)) if parameter.nargs < 0 else [draw(NAMES)]
            elif parameter.name == "file":
                words.append(draw(st.sampled_from(["file", "file", "-", ".", "nowhere", "\udcff", "a\x1bb"])))
            elif isinstance(parameter.type, click.Choice):
                words.append(draw(st.one_of(st.sampled_from(list(parameter.type.choices)), TEXTS)))
            else:
                words.append(draw(st.one_of(st.sampled_from(["1", "2"]), TEXTS)))
            continue
        # Without an end of their own, these would wait.
        needed = (name, parameter.name) in (("watch", "timeout"), ("take", "timeout"), ("watch", "number"))
        if not needed and draw(st.integers(0, 3)):
            continue
        option = parameter.opts[0]
        if parameter.name == "url":
            words += [
                option,
                draw(
                    st.sampled_from(["redis://127.0.0.1:1", "redis://[::1", "x", "unix://\udcff", "", "redis://\x1b:1"])
                ),
            ]
        elif parameter.is_flag:
            words.append(option)
        elif parameter.name == "output":
            paths = [
                "out.npy",
                "out.npz",
                "-",
                ".",
                "none/out.npy",
                "x" * 300 + ".npz",
                "a\udcff\x1b.npz",
                "",
            ]
            words += [option, draw(st.sampled_from(paths))]
        elif needed:
            words += [option, draw(st.sampled_from(["0", "0.01", "1", "nan", "-1", "x", ""]))]
        else:
            words += [option, draw(TEXTS)]
    if draw(st.integers(0, 9)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(TEXTS))
    # No system passes on a null byte.
    return name, [word.replace("\0", "") for word in words]


@pytest.fixture
def run(durations, clock, real_server, monkeypatch, tmp_path):
    """Runs a command in a directory of its own. Returns its result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    # Long enough for a server on a busy machine, and short for addresses at which there is none.
    durations(opening=1.0)

    def invoke(name, words, data):
        (tmp_path / "file").write_bytes(data)
        started = time.monotonic()
        # It waits between two looks.
        with clock.running() if name == "watch" else contextlib.nullcontext():
            result = CliRunner().invoke(main, [name, *words], input=data)
        assert time.monotonic() - started < 30
        return result

    return invoke


def check(result, *, exact=False, codes=EXIT_CODES):
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in codes
    assert "Traceback" not in result.output
    if not exact:
        assert raw_text(result.stdout_bytes) == []
    assert raw_text(result.stderr_bytes) == []
    assert len(result.stderr) < 3000


def populate(client):
    """There is always something to read, and to take."""
    made = [
        redisacc.ConditionalAccumulator("float32", [3], "w", redis=client, worker="ann"),
        redisacc.SparseConditionalAccumulator("float32", [9, 2], "s", redis=client, worker="ann"),
    ]
    for acc in made:
        acc.set_global_step(0)
        acc.apply_grad(*(([1.0, 2.0, 3.0],) if acc is made[0] else ([1], [[1.0, 1.0]])))
        acc.close()


def test_arguments(search, real_client, run):
    def one(command, data):
        name, words = command
        if name in ONLY_PARSED:
            try:
                main.make_context("redisacc", [name])
                COMMANDS[name].make_context(name, list(words))
            except (click.ClickException, click.exceptions.Exit):
                pass
            return
        populate(real_client)
        result = run(name, words, data)
        # A gradient is no text, and rules for the server hold the pattern exactly as it was given.
        exact = name == "acl" or ("--output" in words and "-" in words)
        check(result, exact=exact, codes=EXIT_CODES + PROGRAM_CODES if name == "run" else EXIT_CODES)
        if "--json" in words and "--help" not in words and result.exit_code == 0 and result.stdout.startswith("{"):
            for line in result.stdout.splitlines() if name == "watch" else [result.stdout]:
                json.loads(line)

    search(one, arguments(), files(), examples=25)


def test_files(search, real_client, run):
    def one(name, data, from_input):
        populate(real_client)
        before = {name: real_client.hget(f"redisacc:{{{name}}}", "num_accumulated") for name in ("w", "s")}
        result = run("apply", [name, "-" if from_input else "file"], data)
        check(result)
        after = {name: real_client.hget(f"redisacc:{{{name}}}", "num_accumulated") for name in ("w", "s")}
        assert (after != before) == (result.exit_code == 0)

    search(one, st.sampled_from(["w", "s"]), files(), st.booleans(), examples=15)


@every_row("file", FILES)
def test_each_file(real_client, run, file):
    populate(real_client)
    dense = ("dense", "dense.npz", "version 2", "version 3", "big-endian", "lzma", "bz2", "int")
    accepted = {"w": dense, "s": ("sparse",)}
    for name, files in accepted.items():
        result = run("apply", [name, "file"], FILES[file])
        check(result)
        assert result.exit_code == (0 if file in files else 2), result.output
        assert (name, file) != ("w", "bomb") or "claim to unpack to 1099511627776" in result.stderr


def test_files_that_are_none(real_client, run, tmp_path):
    populate(real_client)
    (tmp_path / "loop").symlink_to("loop")
    for path in (".", "nowhere", "loop", "/dev/null", "/proc/self/mem", "x" * 5000, "\udcff"):
        result = run("apply", ["w", path], b"")
        check(result)
        assert result.exit_code == 2, (path, result.output)
