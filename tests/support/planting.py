"""Hostile text, and whether it comes out raw."""

import re

import numpy as np

# Each of these, printed as it is, changes a terminal, a line or what stands beside it. "pwn" ends every one.
PIECES = [
    b"\x1b]0;pwn\x07pwn", b"\x1b[7;31mpwn", b"\xc2\x9b7mpwn", b"\x9b7mpwn", b"\rpwn", b"\npwn", b"\x08pwn",
    "\u202epwn".encode(), "\u2028pwn".encode(), b"\x00pwn", b"\xff\xfepwn",
]  # fmt: skip
# All at once, in UTF-8 and not; alone; and very long or deep.
TEXTS = {
    "utf8": b"".join(piece for piece in PIECES if piece[:1] not in (b"\x9b", b"\xff")),
    "binary": b"".join(PIECES),
    "escape": PIECES[0],
    "long": b"x" * 10_000,
    "deep": b"[" * 10_000,
}

_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAW = [piece.decode(errors="surrogateescape") for piece in PIECES]


def raw_text(output, *, styled=False):
    """Returns what should have been escaped in an output: planted pieces, and control characters.

    Args:
        output: what a command printed, or a message.
        styled: whether it was printed on a terminal, where rich moves the cursor and colors text.
    """
    text = output.decode(errors="surrogateescape") if isinstance(output, bytes) else output
    # A line may begin with anything, and a terminal gets a carriage return before each line feed.
    found = [piece for piece in _RAW if piece in text and piece != "\npwn"]
    rest = _STYLE.sub("", text).replace("\r", "") if styled else text
    return found + sorted({c for c in rest if not c.isprintable() and c != "\n"})


def trees():
    """Yields two versions of a tree, which differ in a leaf and in two rows of another one."""
    table = np.zeros((10, 4), np.float32)
    yield {"table": table, "bias": np.zeros(3)}
    table = table.copy()
    table[[0, 2]] = 1
    yield {"table": table, "bias": np.ones(3)}
