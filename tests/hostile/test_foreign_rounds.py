"""Foreign bytes where a round keeps its gradients: a typed error that names the key, no huge allocation, no damage.

A table of what is stored, and of what is written over it. For each row of the table, reading the round fails and
changes nothing; a take that was granted keeps the round listed and complete; and the accumulator can be deleted.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from foreign import KINDS, RECORD, Round, gradients_in, refused
from support.servers import contents

import redisacc

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey", "redis62"), pytest.mark.usefixtures("little_memory")]


class Forgery(NamedTuple):
    """A row of the table.

    Attributes:
        id: what is written.
        kind: a key of KINDS.
        storage: a key of STORAGES.
        plant: writes it. If it is a generator, the round is read after each step.
        match: what the error says, besides the key.
        stops_apply: whether nothing is added to the sums either.
    """

    id: str
    kind: str
    storage: str
    plant: Callable[[Round], Iterable[object] | None]
    match: str = r"redisacc:\{w\}|WRONGTYPE"
    stops_apply: bool = False


def cut(data: bytes) -> bytes:
    return data[:-1]


BUFFERED = ("buffered_inline", "buffered_parts")


def forged_sums() -> Iterator[Forgery]:
    rows = {
        "empty": lambda row: b"",
        "cut short": cut,
        "cut within its count": lambda row: row[:5],
        "too long": lambda row: row + b"\0",
        "text": lambda row: b"text",
        "of another width": lambda row: row[:8] + row[12:],
    }
    fields = [b"x", b"", b"-1", b"1.5", b"01", b" 1", b"9223372036854775808", b"9" * 30, b"9" * 5000, b"\xff"]
    fields.append("٣".encode())
    for kind in ("dense", "sparse"):
        for how, change in rows.items():
            yield Forgery(f"row {how}", kind, "in_place", lambda r, c=change: r.row("1", c), stops_apply=True)
        for count in (0, 5, 2**63, 2**64 - 1):
            head = count.to_bytes(8, "little")
            yield Forgery(
                f"row counts {count}", kind, "in_place", lambda r, h=head: r.row("1", lambda row: h + row[8:])
            )
    for kind in ("dense", "unbounded"):
        for field in fields:
            yield Forgery(f"row named {field[:20]!r}", kind, "in_place", lambda r, f=field: r.another_row(f, "1"))
    yield Forgery("row missing", "dense", "in_place", lambda r: r.row("1", lambda row: None))
    for value in (0.5, math.nan, math.inf, 1e300):
        data = np.array([value], "<f8").tobytes()
        yield Forgery(f"integer {value}", "integers", "in_place", lambda r, d=data: r.row("0", lambda row: row[:8] + d))


def forged_sums_of_trees() -> Iterator[Forgery]:
    fields = [
        b"x", b":", b":0", b"0", b"dense:float32", b"dense:float32:", b"dense:float32:00", b"dense:float32:1",
        b"dense:float64:0", b"dense:int32:-1", b"sparse:s:x", b"sparse:s:9", b"sparse:s:9223372036854775808",
        b"sparse:nothing:1", b"sparse:s:1:1", b"present:1", b"total:0", b"\xff\x1b[31m:1", b"x" * 5000 + b":1",
    ]  # fmt: skip
    for field in fields:
        like = "sparse:s:1" if field.startswith(b"sparse") else "dense:float32:0"
        yield Forgery(f"row named {field[:20]!r}", "tree", "in_place", lambda r, f=field, w=like: r.another_row(f, w))
    changes = {
        "removed": lambda row: None,
        "cut": cut,
        "longer": lambda row: row + b"\0",
        "empty": lambda row: b"",
        "of another count": lambda row: b"\x03" + row[1:],
    }
    for field, (how, change) in itertools.product(
        ("dense:float32:0", "dense:int32:0", "sparse:s:1", "present:0", "total"), changes.items()
    ):
        # A total that lacks its last digit is still a total. Whoever reads the round counts the rows.
        stops = how not in ("removed", "of another count") and (field, how) != ("total", "cut")
        yield Forgery(f"{field} {how}", "tree", "in_place", lambda r, f=field, c=change: r.row(f, c), stops_apply=stops)
    for present in (-1, 3, 2**31, 2**32 + 1, 2**53, 0.5, math.nan, math.inf):
        counts = struct.pack("<3d", 2, present, 2)
        yield Forgery(
            f"leaf held {present} times",
            "tree",
            "in_place",
            lambda r, c=counts: r.row("present:0", lambda row: row[:8] + c),
        )


# What may stand where a list of sizes, a number or a text belongs.
MISFITS = (
    None, "x", -1, 10**18, [], [[]], ["x"], [-1], [2**63 - 1], [2**62, 2**62], [0] * 5, {}, 1.5, True,
)  # fmt: skip
BOMBS = {
    "deep": b"\x91" * 200_000,
    "less deep": b"\x91" * 400,
    "deep maps": b"\x81\xa1a" * 5000,
    "long and true": b"\xdd\x00\x10\x00\x00" + b"\x01" * 2**20,
    "long array": b"\xdd\xff\xff\xff\xff",
    "long map": b"\xdf\xff\xff\xff\xff",
    "long text": b"\xdb\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "unhashable key": b"\x81\x90\x01",
    "bad text": b"\x81\xa1\xff\x01",
    "time": b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
}
ENTRIES = (b"", b"x", b"0", b"0 ", b"0 \xc1", b"0 \xff" * 9, b"\x80", b"0 \x93\x01", b"-1 \x80", b"0 \x80", b"0 \x90")


def other_headers(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields headers that do not match the data."""
    for field, right in header.items():
        yield {name: value for name, value in header.items() if name != field}
        yield from ({**header, field: value} for value in MISFITS if value != right)
    ((dtype, shape),) = header["sections"]
    for misfit in MISFITS:
        yield from ({**header, "sections": [wrong]} for wrong in (misfit, [misfit, shape], [dtype, misfit]))
    for sections in ([[dtype]], [[dtype, shape, shape]], [[dtype, shape]] * 2, [["float64", shape]]):
        yield {**header, "sections": sections}
    for forged in ([shape[0] + 1, *shape[1:]], shape * 2, [float(dim) for dim in shape], [2**40, *shape[1:]], [0]):
        yield {**header, "sections": [[dtype, forged]]}
    # This one has no parts, because it is inline.
    nbytes = 4 * math.prod(shape) + (8 * shape[0] if len(shape) == 2 else 0)
    for parts in ([nbytes], [nbytes - 1], [0, nbytes], [-1, nbytes + 1], [float(nbytes)], [1] * 100_000):
        yield {**header, "parts": parts}
    yield {**header, "gradients": 2}


def forged_headers() -> Iterator[Forgery]:
    def all_headers(r: Round) -> Iterator[None]:
        forged = list(other_headers(r.header))
        assert len(forged) > 100
        for header in forged:
            r.write_header(header)
            yield

    for kind in ("dense", "sparse"):
        yield Forgery("header forged", kind, "buffered_inline", all_headers)
        if kind == "dense":
            # The count says two. Two sparse gradients without rows would look the same.
            yield Forgery("entry missing", kind, "buffered_inline", lambda r: r.entry(lambda _: None))
        for entry in ENTRIES:
            yield Forgery(f"entry {entry[:9]!r}", kind, "buffered_inline", lambda r, e=entry: r.entry(lambda _: e))
        for how, bomb in BOMBS.items():
            packed = b"0 " + bomb
            yield Forgery(f"header {how}", kind, "buffered_inline", lambda r, p=packed: r.entry(lambda _: p))


# The sections of the tree in order: 2·2 float32, 3 int32, 2 rows of 2 float32, and 3 int32 that count leaves.
D, N, S, P = ["float32", [4]], ["int32", [3]], ["float32", [2, 2]], ["int32", [3]]
SECTIONS: dict[str, Any] = {
    "none": [],
    "one less": [D, N, S],
    "one more": [D, N, S, P, P],
    "in another order": [D, S, N, P],
    "another dtype": [["float64", [4]], N, S, P],
    "no dtype": [["O", [4]], N, S, P],
    "another size": [["float32", [5]], N, S, P],
    "another rank": [["float32", [2, 2]], N, S, P],
    "rows of another shape": [D, N, ["float32", [2, 3]], P],
    "fewer rows": [D, N, ["float32", [1, 2]], P],
    "more rows": [D, N, ["float32", [3, 2]], P],
    "huge": [D, N, ["float32", [2**55, 2]], P],
    "negative": [D, N, ["float32", [-1, 2]], P],
    "rows without a number": [D, N, ["float32", []], P],
    "the sum dtype": [D, ["int64", [3]], S, P],
    "no pairs": [D, N, S, "present"],
    "no list": "sections",
    "nothing": None,
}
# The sparse section has 16 bytes of indices and 16 of rows, and the dense ones have 16, 12 (and 4 between them) and 12.
PARTS = (
    [76], [32, 44, 0], [0, 76], [32, 43], [44, 32], [16, 60], [31, 45], [32] * 3, [2**63, 1], [-1, 77], "x", None,
    [32.0, 44.0],
)  # fmt: skip


def forged_headers_of_trees() -> Iterator[Forgery]:
    def sections(r: Round, forged: Any, how: str) -> None:
        assert r.header["sections"] == [D, N, S, P]
        header = {**r.header, "sections": forged}
        if how == "huge" and header["parts"]:
            # Lengths that are consistent with the sections, as far as they go.
            header["parts"] = [2**55 * 16, sum(header["parts"][1:])]
        r.write_header(header)

    def parts(r: Round, forged: Any) -> None:
        assert r.header["parts"] == [32, 44]
        for number in range(2):
            r.write_header({**r.header, "parts": forged}, number)

    for storage, (how, forged) in itertools.product(BUFFERED, SECTIONS.items()):
        yield Forgery(f"sections: {how}", "tree", storage, lambda r, f=forged, h=how: sections(r, f, h))
    for forged in PARTS:
        yield Forgery(f"parts {forged}", "tree", "buffered_parts", lambda r, f=forged: parts(r, f))


def replaced(start: int, data: bytes) -> Callable[[bytes], bytes]:
    """Returns what writes bytes over others, counted from the end if `start` is negative."""

    def change(held: bytes) -> bytes:
        at = start % len(held)
        return held[:at] + data + held[at + len(data) :]

    return change


def forged_data() -> Iterator[Forgery]:
    changes = {
        "missing": lambda data: None,
        "empty": lambda data: b"",
        "cut": cut,
        "too long": lambda data: data + b"x",
    }
    for kind, storage, (how, change) in itertools.product(("dense", "sparse"), BUFFERED, changes.items()):
        yield Forgery(f"data {how}", kind, storage, lambda r, c=change: r.data(c))
    for kind in ("dense", "sparse"):
        yield Forgery("a part is a list", kind, "buffered_parts", lambda r: r.retype(f"{RECORD}:part:*"))
        yield Forgery("inline is a list", kind, "buffered_inline", lambda r: r.retype(f"{RECORD}:inline"))
    for storage, indices in itertools.product(
        BUFFERED, ([-1, 0, 1], [1, 1, 2], [2, 1, 0], [0, 1, 9], [0, 1, 2**63 - 1])
    ):
        change = replaced(0, np.array(indices, "<i8").tobytes())
        yield Forgery(f"indices {indices}", "sparse", storage, lambda r, c=change: r.data(c, part=0))
    for indices in ([4, 1], [1, 1], [-1, 4], [1, 9], [1, 2**63 - 1]):
        change = replaced(0, np.array(indices, "<i8").tobytes())
        yield Forgery(f"indices {indices}", "tree", "buffered_inline", lambda r, c=change: r.data(c))
    # The sum of both gradients is checked, so -1 in one of them may look like a leaf that it lacks.
    for present in ([-2, 1, 1], [1, 2, 1], [2**31 - 1] * 3):
        change = replaced(-12, np.array(present, "<i4").tobytes())
        yield Forgery(f"leaves held {present} times", "tree", "buffered_inline", lambda r, c=change: r.data(c))

    def compacted(r: Round, counts: bytes) -> None:
        r.entry(lambda entry: None, 1)
        r.data(lambda data: None, 1)
        r.write_header({**r.header, "gradients": 2})
        r.data(lambda data: data[:16] + counts + data[16:])

    for given in ([0, 2], [3, 1], [2**64 - 1, 1]):
        counts = np.array(given, "<u8").tobytes()
        yield Forgery(f"counts {given} in a sum", "tree", "buffered_inline", lambda r, c=counts: compacted(r, c))


BLOCK_BYTES = 260
NO_SCALE = r"redisacc:\{w\}.*: a block of int8 has the scale"


def forged_encodings() -> Iterator[Forgery]:
    def rewritten(r: Round, change: Callable[[bytes], bytes], sections: Any = None) -> None:
        """Changes the last gradient, so that the length of the part is that of the data."""
        held: list[bytes] = []
        r.data(lambda data: held.append(change(data)) or held[0], 1)
        header = {**r.header, **({} if sections is None else {"sections": sections})}
        r.write_header({**header, "parts": [len(held[0])] if header["parts"] else []}, 1)

    def same(data: bytes) -> bytes:
        return data

    unknown = "it stores elements as .*, and this version of redisacc reads float32, bfloat16, int8"
    for storage in BUFFERED:
        for kind, (scale, block) in itertools.product(
            ("int8", "int8 rows"), [(-1.0, 0), (np.nan, 2), (np.inf, 1), (-np.inf, 2), (3e38, 0)]
        ):
            # The values are what comes last, and end with whole blocks.
            change = replaced(-(3 - block) * BLOCK_BYTES, np.array([scale], "<f4").tobytes())
            yield Forgery(
                f"scale {scale}",
                kind,
                storage,
                lambda r, c=change: rewritten(r, c),
                NO_SCALE,
            )
        for encoding, claimed in itertools.permutations(("dense", "bfloat16", "int8"), 2):
            section = [[claimed.replace("dense", "float32"), [600]]]
            yield Forgery(
                f"claims {claimed}", encoding, storage, lambda r, s=section: rewritten(r, same, s), "(bytes|parts)"
            )
        for how, change in {"less": lambda data: data[:-BLOCK_BYTES], "cut": cut, "more": lambda d: d + b"x"}.items():
            yield Forgery(f"data {how}", "int8", storage, lambda r, c=change: rewritten(r, c), "bytes")
        yield Forgery(
            "a block missing", "int8", storage,
            lambda r: rewritten(r, lambda data: data[:-BLOCK_BYTES], [["int8", [512]]]),
            r"its shape is \[512\] in a round of \[600\]",
        )  # fmt: skip
        for name in ("int4", "float64", "int8\0", 8, None, ["int8"]):
            section = [[name, [600]]]
            yield Forgery(f"stored as {name}", "int8", storage, lambda r, s=section: rewritten(r, same, s), unknown)
        for section in ([["int8", [600], 256]], [["int8"]], [["int8", [600]], ["int8", [600]]], ["int8"]):
            yield Forgery(
                f"sections {section}", "int8", storage, lambda r, s=section: rewritten(r, same, s), "did not write"
            )


FORGERIES = [
    *forged_sums(), *forged_sums_of_trees(), *forged_headers(), *forged_headers_of_trees(), *forged_data(),
    *forged_encodings(),
]  # fmt: skip


# `make test` tries each damage once, and one in each kind of accumulator and storage.
USUAL = {what: case for case in reversed(FORGERIES) for what in (case.id, (case.kind, case.storage))}.values()


@pytest.mark.slow(keep="dense-buffered_parts|sparse-buffered_inline|bfloat16")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in USUAL else pytest.mark.thorough) for case in FORGERIES],
    ids=lambda case: f"{case.kind}-{case.storage}-{case.id}",
)
def test_a_round_that_cannot_be_read(opened, client, case):
    acc = opened(case.kind, case.storage)
    for _ in case.plant(Round(client, acc)) or [None]:
        refused(acc.peek, client, case.match)
    if case.stops_apply:
        refused(lambda: acc.apply_grad(*KINDS[case.kind][3]), client, "sums")
    held = gradients_in(contents(client))
    with pytest.raises(redisacc.CorruptDataError):
        acc.take_grad(1, timeout=5)
    assert gradients_in(contents(client)) == held
    listed = [(one.global_step, one.num_accumulated) for one in acc.info().unacknowledged]
    assert listed == ([(0, 2)] if acc.global_step() else [])
    if listed:
        # Its owner may look at it, discard it or repair it.
        with pytest.raises(redisacc.CorruptDataError), acc.recover():
            pytest.fail("it was read")
        assert acc.apply_grad(*KINDS[case.kind][3], local_step=9)
    acc.delete()
    assert not client.exists(RECORD)
