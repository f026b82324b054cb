"""What may stand in the place of a stored value, by the sorts of text and bytes that stored.py names."""

import itertools
import json
import re
import struct
from typing import NamedTuple

import msgpack
import numpy as np
from support.planting import TEXTS

# Nothing at all.
GONE = None
LONG = b"9" * 5000
DEEP = b"[" * 100_000
VERSION = b"0123456789abcdef"

# Instead of any word, and of any value.
ALIENS = {"empty": b"", "x": b"x", "not UTF-8": b"\xff\xfe\x00", **TEXTS}

NO_NUMBERS = (b"-1", b"1.5", b"1e3", b" 1", b"01x", b"9" * 40, b"1" + b"0" * 15, "٣".encode(), b"nan")
NO_SHAPES = (
    b"[-1]", b"[99999999999999]", b"[9223372036854775807,2]", b"[1.0]", b"[true]", b"[[2]]", b"[2,2,2]", b"2",
    b"[" * 4000, b"[1," * 3000, b"[" + b"1," * 300 + b"1]", b"[" + b"1," * 99 + b"1]", b"[" + LONG + b"]",
)  # fmt: skip
NO_LEAVES = (
    b"7", b"null", b"{}", b"[]", DEEP, b"[" * 65 + b'"float32 []"' + b"]" * 65, b'["\\ud800"]', b'{"d":"a dict"}',
    b'{"\x1b]0;pwn\x07pwn":"float32 []"}', b'{"\\u001b[31mpwn":"float32 []"}',
    b'"float32 [9223372036854775807,9223372036854775807]"', b'"float64 [1000000000000]"',
    b'"float32 [' + b"1," * 300 + b'1]"', b'"text []"', b'{"a":"float32 []","a":"float32 []"}',
    json.dumps(["float32 []"] * 100_001, separators=(",", ":")).encode(),
)  # fmt: skip
WORDS = {
    "number": NO_NUMBERS,
    "time": (*NO_NUMBERS, b"9" * 15),
    "step": (b"-", b"--1", b"1.0", b"1e3", b" 1", b"9223372036854775808", b"-9223372036854775809", LONG, "٣".encode()),
    "weight": (b"0", b"-1", b"nan", b"inf", b"1e400", b"1e-300", b"1e-40", b"0x1", b" 1", b"1" * 25),
    "lateness": (b"linear", b"1,0.5,0.25"),
    "version": (b"2", b"44", b"4.0", b"future"),
    "word": (b"X", b"exploded", b" "),
    "kind": (b"dense", b"sparse", b"tree", b"Tree", b"tree\n"),
    "dtype": (b"float64", b"int8", b"float", b"float32,", b"O"),
    "encoding": (b"float32", b"bfloat16", b"int8", b"float64", b"bfloat16 "),
    "id": (b"v" * 100, b"a b"),
    "shape": NO_SHAPES,
    "declared": (*NO_SHAPES[2:-3], NO_SHAPES[-1]),
    "structure": NO_LEAVES,
    "kept": (b"{", b"[1, 2]", b"x", b'"' + b"x" * 1024 + b'"', b"[" * 1024),
    "metrics": (b"loss", b"loss=", b"=1", b"loss=x"),
    "partitions": (b"0", b"0,0", b"0,1,", b"01,2", b"-1,2", b"1,x", b"99999,2", b"0," * 5000),
    "staleness": (b"0", b"0:", b":1", b"0:9", b"9:2", b"0:1,0:1", b"1:1,0:1", b"0:-1", b"0:1," * 2000),
    "real": (b"-8.0", b"nan", b"1e400", b"0x1.0p+3", b"0" * 10_000),
    "scalars": (b";" * 10_000, b"1.0", b"nan,nan,nan", b"inf", b"9"),
    "history": (b"1", b"1 2", b"x 1 1 a=1", b"9223372036854775808 1 1 a=1", b"1 1 1 a", b"1 1 1 " + b"a=1 " * 500),
    "name": (),
}
# What is longer than any value, and what brings nothing more where a name may be anything.
NO_HARM = {"name"}


class Damage(NamedTuple):
    """A value, or none, in the place of another one.

    Attributes:
        name: what is different.
        value: what is written; None: what was there is removed.
        fits: whether a value of this sort may say so, so that results may differ.
    """

    name: str
    value: bytes | None
    fits: bool = False


def damages(form, held, *, gradient=None):
    """Yields all damages of a value.

    Args:
        form: the sorts of its words, as in stored.py.
        held: the value.
        gradient: describes the gradients, if the value is bytes of one of them.
    """
    sorts = form.split(" ")
    # What is empty is not in use here.
    hint = form.endswith("~") or (not held and "?" in form)
    yield Damage("missing", GONE, fits="?" in form or hint)
    if special := SPECIAL.get(form.rstrip("?~")):
        for number, value in enumerate(special(held, gradient)):
            if value != held:
                yield Damage(f"{form} {number}: {value[:30]!r}", value, fits=hint)
        for name, alien in ALIENS.items():
            yield Damage(name, alien, fits=hint or (not alien and "?" in form))
        return
    words = held.split(b" ", len(sorts) - 1)
    if len(sorts) > 1:
        shown = hint or all(sort.endswith("~") for sort in sorts)
        for name, alien in ALIENS.items():
            yield Damage(name, alien, shown)
        for end in range(1, len(words)):
            yield Damage(f"only {end} words", b" ".join(words[:end]), shown)
    for at, (sort, word) in enumerate(zip(sorts, words, strict=False)):
        plain = sort.rstrip("?~")
        fits = plain in NO_HARM or "~" in sort or hint
        for alien in (*ALIENS.values(), *WORDS[plain]):
            if alien != word:
                value = b" ".join([*words[:at], alien, *words[at + 1 :]])
                yield Damage(f"{alien[:30]!r} as {plain} {at}", value, fits or (not alien and "?" in sort))


def numbers_changed(text, number=rb"(?<![0-9a-f])\d+(?![0-9a-f])"):
    """Yields the text with each of its first numbers changed, and repeated without end."""
    for match in itertools.islice(re.finditer(number, text), 12):
        for other in (b"", b"-1", b"9" * 30, b"%d" % (int(match[0]) + 1)):
            yield text[: match.start()] + other + text[match.end() :]
    yield b" ".join([text] * 20_000)


def blobs(held, _):
    """Lists of blobs of parameters."""
    yield from (b"x:0:0:0-2", b":" * 10_000)
    yield from (VERSION + rest for rest in (b"-full:", b"-full:0:0:0-99999", b"-base:0:0:"))
    yield from (b"%s-%s:%s" % (VERSION, sort, b"9" * 30) for sort in (b"flat", b"full", b"rows", b"state"))
    if held:
        yield held.replace(b"-", b"-other_", 1)
        # Not the steps, because others may be right.
        yield from numbers_changed(held, rb"\d+(?=[ ,=]|$)|\d{3,}(?=:)")


def slots(held, gradient):
    """Lists of blobs of which none may be missing."""
    yield from blobs(held, gradient)
    entries = held.split(b" ")
    if len(entries) > 1:
        yield from (b" ".join(others) for others in (entries[:-1], entries[1:]))


def structure(held, _):
    """Structures of trees."""
    yield from NO_LEAVES
    yield held.replace(b",", b", ")
    yield held.replace(b"float32", b"float31")
    yield from numbers_changed(held)


def optimizer(held, _):
    """Descriptions of optimizers."""
    yield from (b"{}", b"[]", b"null", DEEP, b'{"name":"future"}', b" " * (2**20 + 1))
    if held:
        right = json.loads(held)
        yield json.dumps({**right, "name": "\x1b]0;pwn\x07pwn"}).encode()
        for name in right:
            for value in ("nan", "x", [1.0] * 9, None, {"a": 1}):
                # A function as `lr` is null.
                if value != right[name] and (name, value) != ("lr", None):
                    yield json.dumps({**right, name: value}).encode()


class Gradient(NamedTuple):
    """The bytes of a gradient of an accumulator.

    Attributes:
        indices: the indices of the sparse section that comes first; empty if there is none.
        highest: the highest index; None if any is allowed.
        nbytes: the length of all its bytes.
        present: how many leaves are counted at the end.
        blocks: the int8 blocks at the end.
        integers: whether sums are doubles that must be integers.
        booleans: whether the last byte is a boolean, if it is 0 or 1.
    """

    indices: tuple[int, ...] = ()
    highest: int | None = None
    nbytes: int = 0
    present: int = 0
    blocks: int = 0
    integers: bool = False
    booleans: bool = False


# What may stand where a list of sizes, a number or a text belongs.
MISFITS = (None, "x", -1, 10**18, [], [[]], ["x"], [-1], [2**63 - 1], [2**62, 2**62], [0] * 5, {}, 1.5, True)
BOMBS = (
    b"", b"0", b"\xc1", b"\xff" * 9, b"\x80", b"\x93\x01", b"\x90", b"\x91" * 200_000, b"\x91" * 400,
    b"\x81\xa1a" * 5000, b"\xdd\x00\x10\x00\x00" + b"\x01" * 2**20, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x81\x90\x01", b"\x81\xa1\xff\x01",
    b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
)  # fmt: skip


def header(held, _):
    """Entries of buffered gradients: a place and a header."""
    place, _, packed = held.partition(b" ")
    yield from (bomb for bomb in BOMBS)
    yield from (place + b" " + bomb for bomb in BOMBS)
    yield from (other + b" " + packed for other in (b"-1", b"x", b"", b"9" * 40, place + b"*0", place + b"*nan"))
    right = msgpack.unpackb(packed)
    for forged in other_headers(right):
        if forged != right:
            yield place + b" " + msgpack.packb(forged)


def other_headers(right):
    """Yields headers that do not match the data."""
    for field in right:
        yield {name: value for name, value in right.items() if name != field}
        yield from ({**right, field: value} for value in MISFITS)
    yield {**right, "gradients": right["gradients"] + 1}
    sections = right["sections"]
    changed = [sections[:-1], sections * 2]
    if len(sections) > 1:
        changed.append(sections[::-1])
    for at, (dtype, shape) in enumerate(sections):
        others = [[dtype], [dtype, shape, shape], dtype, *([misfit, shape] for misfit in (*MISFITS, "float64", "O"))]
        others += [[dtype, misfit] for misfit in MISFITS]
        others += [[dtype, other] for other in (shape * 2, [float(dim) for dim in shape], [2**55, *shape[1:]])]
        others += [[other, shape] for other in ("float32", "bfloat16", "int8", "int4", "int8\0") if other != dtype]
        if shape:
            others += [[dtype, [shape[0] + step, *shape[1:]]] for step in (1, -1)]
            others += [[dtype, [*shape[:-1], shape[-1] + 1]]]
        changed += [[*sections[:at], other, *sections[at + 1 :]] for other in others]
    yield from ({**right, "sections": forged} for forged in changed)
    whole = sum(right["parts"])
    for parts in ([whole], [whole - 1], [0, whole], [-1, whole + 1], [float(whole)], [2**63, 1], [1] * 10_000):
        yield {**right, "parts": parts}
    yield {**right, "parts": [*right["parts"], 0]}
    # Lengths that are consistent with the sections, as far as they go.
    if right["parts"] and sections:
        huge = [[dtype, [2**55, *shape[1:]]] for dtype, shape in sections]
        yield {**right, "sections": huge, "parts": [2**55 * 16, *right["parts"][1:]]}


def data(held, gradient):
    """The bytes of a gradient, or of a part of it."""
    yield from (held[:-1], held + b"x", held[:-4], held + bytes(4), held + held)
    of = gradient or Gradient()
    packed = np.array(of.indices, "<i8").tobytes()
    if packed and held.startswith(packed):
        right = list(of.indices)
        others = [right[::-1], right[:1] * len(right), [-1, *right[1:]]]
        if of.highest is not None:
            others += [[*right[:-1], of.highest + 1], [*right[:-1], 2**63 - 1]]
        yield from (np.array(other, "<i8").tobytes() + held[len(packed) :] for other in others)
    if of.booleans and held[-1:] in (b"\0", b"\1"):
        yield held[:-1] + b"\2"
    if len(held) != of.nbytes:
        return
    # The sum of all gradients is checked, so -1 in one of them may look like a leaf that it lacks.
    for present in ([-2, 1, 1], [1, 2, 1], [2**31 - 1] * 3)[: of.present]:
        yield held[: -4 * of.present] + np.array(present, "<i4").tobytes()
    for block in range(of.blocks):
        start = len(held) - (of.blocks - block) * 260
        for scale in (-1.0, np.nan, np.inf, -np.inf, 3e38):
            yield held[:start] + np.array([scale], "<f4").tobytes() + held[start + 4 :]
    if of.blocks:
        yield held[:-260]


# What grows into a row: zeros, what looks like a weight or a count, and what looks like the form with a weight.
FILLERS = (bytes(8), struct.pack("<d", 2.0), struct.pack("<2f", 1.5, 2.0), b"\x01" + bytes(7), b"\x01" * 8)
# Where bytes come or go: in the count, at the form, behind it, behind the weight, and at the end.
PLACES = (0, 1, 6, 7, 8, 16, None)


def row(held, gradient):
    """Rows of sums: a count, a form, perhaps a weight, and the elements."""
    for count in (0, 5, 2**56 - 1):
        yield count.to_bytes(7, "little") + held[7:]
    yield from (held[:7] + bytes([form]) + held[8:] for form in {0, 1, 2, 255} - {held[7]})
    yield b"\xff" * 8 + held[8:]
    for change, place in itertools.product((-32, -16, -8, -4, -1, 1, 4, 8, 16, 32), PLACES):
        at = len(held) if place is None else place
        if change < 0:
            yield held[:change] if place is None else held[:at] + held[at - change :]
        else:
            yield from (held[:at] + (filler * 4)[:change] + held[at:] for filler in FILLERS)
    if gradient is not None and gradient.integers:
        yield from (held[:-8] + struct.pack("<d", value) for value in (0.5, np.nan, np.inf, 1e300))


def total(held, _):
    """The field `total` of sums: counts of gradients and rows, and perhaps a weight."""
    yield from (held[:-1], held + b"0", held + b" 0", held + b" nan", held + b" 1 1", b"0 0", b"9" * 40 + b" 1")
    yield from numbers_changed(held)


SPECIAL = {
    "blobs": blobs, "slots": slots, "structure": structure, "optimizer": optimizer, "header": header,
    "data": data, "row": row, "total": total,
}  # fmt: skip

# Names of fields, by what stored.py calls them: another value is written under each of them, besides the right one.
NO_INDICES = (
    b"x", b"", b"-1", b"1.5", b"01", b" 1", b"9223372036854775808", b"9" * 30, LONG, b"\xff", "٣".encode(), b":", b":0",
    b"dense:float32", b"dense:float32:", b"dense:float32:00", b"dense:float32:9", b"dense:float64:0", b"dense:int32:-1",
    b"sparse:s:x", b"sparse:s:9223372036854775808", b"sparse:nothing:1", b"sparse:s:1:1", b"present:1", b"total:0",
    b"\xff\x1b[31m:1", b"x" * 5000 + b":1",
)  # fmt: skip
NAMES = {
    "index": NO_INDICES,
    "id": (b"", b"x", b"\xff", LONG, *TEXTS.values()),
    "name": (b"", *TEXTS.values()),
    "worker": (b"worker x", b"worker -1", b"nobody", *TEXTS.values()),
}
