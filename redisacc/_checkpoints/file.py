"""A checkpoint is one file in the format of safetensors: a tensor for each leaf of the parameters and of the state.

It is one file, so that parameters, state and step can never be of different moments: a single rename makes all of them
visible. Tensors have the names ``parameters/PATH`` and ``state/PATH``, so torch, JAX and others can read them. The
metadata hold what the format lacks: the step, and both trees with their dtypes, in the text that Redis holds as well.

complex128 is stored as pairs of float64, and quantised integers as integers; the trees say what they are.

The format is so simple that files are read and written here. Its library reads no bfloat16 into numpy and no addresses.
It writes to a temporary file whose name only it knows, which nobody removes after a kill, and which only its user may
read; it reports a full disk as no OSError; and here the bytes are hashed on their way. The metadata begin with that
hash, of the whole file with zeros in its place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from redisacc._arrays.metrics import parse_kept
from redisacc._arrays.validation import Array
from redisacc._checkpoints.address import Place
from redisacc._format.leaves import Leaf, Schema
from redisacc._interrupts import interrupt_in, suppressed
from redisacc._protocol.leases.process_identity import fate_of, own_identity
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._text import shown
from redisacc.errors import CorruptDataError

FORMAT = "1"

_LARGEST_HEADER = 100_000_000

PARAMETERS, STATE = "parameters", "state"

HASH, _NO_HASH = "sha256", b"0" * 64

# After this many seconds without a change, a temporary file counts as a leftover although its process may be on another
# machine. If that process lives after all, its write fails, and the next one succeeds.
ABANDONED = 3600.0

_TEMPORARY = re.compile(r"\..+\.redisacc-([0-9a-f.]+)-[0-9a-f]{8}\.tmp", re.DOTALL)
_COMPLEX128 = np.dtype(np.complex128)
# The names of the format that do not follow from the kind and the size of an element.
_TYPES = {"bool": "BOOL", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a run.

    Attributes:
        name: the name of the run.
        step: the step of its parameters.
        parameters: the tree.
        state: the chief's state, a tree or None.
        kept: what the program keeps, as text; "": nothing.
    """

    name: str
    step: int
    parameters: Any
    state: Any
    kept: str = ""


def write_file(path: Place, checkpoint: Checkpoint) -> int:
    """Writes a checkpoint, so that after a crash at any moment there is the whole file under this name, or none.

    A file that is there is replaced.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: it cannot be written. Nothing of it is left.
        CorruptDataError: what was written cannot be read.
    """
    metadata = {HASH: _NO_HASH.decode(), "format": f"redisacc {FORMAT}", "name": checkpoint.name}
    metadata["step"] = str(checkpoint.step)
    if checkpoint.kept:
        metadata["kept"] = checkpoint.kept
    tensors: list[tuple[str, Leaf, Array]] = []
    for what, tree in ((PARAMETERS, checkpoint.parameters), (STATE, checkpoint.state)):
        if tree is None and what == STATE:
            continue
        schema, arrays = schema_of(tree, what)
        metadata[what] = schema.text
        paths = [f"{what}/{leaf_path}" for leaf_path in schema.structure.paths]
        tensors.extend(zip(paths, schema.leaves, arrays, strict=True))
    # Programs that map the file into memory find every element at a multiple of its size.
    tensors.sort(key=lambda tensor: (-tensor[1].stored.itemsize, tensor[0]))
    pieces: Iterator[bytes | memoryview] = (leaf.bytes_of(array).data for _, leaf, array in tensors)
    header, hashed = _header(metadata, tensors), hashlib.sha256()
    with replaced_file(path) as file:
        for piece in itertools.chain([header], pieces):
            file.write(piece)
            hashed.update(piece)
        size = file.tell()
        file.seek(header.index(_NO_HASH))
        file.write(hashed.hexdigest().encode())
        file.flush()
        # It also compares the size of the file with its header.
        with _opened(Path(file.name)):
            pass
    return size


@contextlib.contextmanager
def replaced_file(path: Place, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Yields a temporary file in the same folder, which takes the place of ``path`` when the block ends.

    Temporary files of dead processes are removed before that: they may be why the disk is full.

    Args:
        path: the file.
        is_new: whether it must not be there yet. If two processes begin at once, one of them gets FileExistsError.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    if not isinstance(path, Path):
        with path.replaced(is_new=is_new) as file:
            yield file
        return
    if path.exists() and not path.is_file():
        # A rename would replace a device or a pipe, such as /dev/null.
        raise OSError(errno.EEXIST, "is no regular file", str(path))
    # The part of a long name leaves room for the rest.
    name = f".{path.name[:40]}.redisacc-{own_identity()}-{secrets.token_hex(4)}.tmp"
    temporary = path.parent / name
    try:
        with temporary.open("xb") as written:
            _remove_leftovers(path.parent, os.fstat(written.fileno()).st_mtime)
            yield written
            written.flush()
            os.fsync(written.fileno())
        (_link if is_new else os.replace)(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        # A failed write names no file, and other calls name the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    # Without this, the machine may forget the new name in a power failure.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _link(temporary: Path, path: Path) -> None:
    """Gives a file a name that no other file has."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        # Some file systems have no hard links.
        if interrupt_in(error) is not None or path.exists():
            raise
        os.replace(temporary, path)


def _remove_leftovers(folder: Path, now: float) -> None:
    """Removes the temporary files of processes that were killed.

    Args:
        folder: where they are.
        now: the time by the clock that gives the files of this folder their times.
    """
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        with suppressed(OSError):
            fate = fate_of(match[1])
            # A process of another machine or container may live. While it writes, its file changes.
            if fate == "dead" or (fate is None and path.stat().st_mtime < now - ABANDONED):
                path.unlink(missing_ok=True)


def _header(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Leaf, Array]]) -> bytes:
    """Returns the beginning of a file: its length, and JSON with the type, the shape and the place of each tensor."""
    described: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, leaf, _ in tensors:
        start, end = end, end + leaf.nbytes
        described[name] = {**_described(leaf), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _described(leaf: Leaf) -> dict[str, Any]:
    """Returns the type and the shape of a leaf, as the header has them."""
    dtype, shape = leaf.stored, leaf.shape
    if dtype.newbyteorder("=") == _COMPLEX128:
        dtype, shape = np.dtype(np.float64), (*shape, 2)
    return {"dtype": _TYPES.get(dtype.name) or f"{dtype.kind.upper()}{8 * dtype.itemsize}", "shape": [*shape]}


@contextlib.contextmanager
def _opened(path: Place) -> Iterator[tuple[Any, int, Mapping[str, str], dict[str, Any], Any]]:
    """Opens a file, and reads its header. The size that it gives is compared with the file's.

    Yields:
        The file, and how many bytes follow; the metadata; what the header says of each tensor; and the header's hash.

    Raises:
        OSError: the file cannot be read.
        CorruptDataError: it is damaged, or the block has raised ValueError or the like.
    """
    try:
        with path.open("rb") as file:
            header = file.read(8)
            header += file.read(min(int.from_bytes(header, "little"), _LARGEST_HEADER))
            tensors = json.loads(header[8:])
            metadata = tensors.pop("__metadata__", {})
            size = max([each["data_offsets"][1] for each in tensors.values()], default=0)
            end = len(header) + size
            if file.seek(0, os.SEEK_END) != end or not all(isinstance(each, str) for each in metadata.values()):
                raise ValueError(f"it must have {end} bytes, and texts in its metadata")
            file.seek(len(header))
            hashed = hashlib.sha256(header.replace(metadata.get(HASH, "").encode(), _NO_HASH, 1))
            yield file, size, metadata, tensors, hashed
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"{path} is damaged, or no file of safetensors: {shown(str(error))}") from None


def name_in(path: Place) -> str | None:
    """Returns the name of the run in a checkpoint of any version; None if the file is none, or cannot be read."""
    try:
        with _opened(path) as (_, _, metadata, *_):
            return metadata.get("name") if metadata.get("format", "").startswith("redisacc ") else None
    except (CorruptDataError, OSError) as error:
        if interrupt_in(error) is not None:
            raise
        return None


def check_file(path: Place) -> str | None:
    """Returns the name of the run in a checkpoint. Raises what ``read_file`` does, and needs no memory for arrays."""
    with _opened(path) as (file, _, metadata, _, hashed):
        _check(metadata, hashlib.file_digest(file, lambda: hashed))
        return metadata.get("name")


def read_file(path: Place) -> Checkpoint:
    """Returns the checkpoint in a file. You may change its arrays.

    Raises:
        OSError: the file cannot be read.
        CorruptDataError: the file is damaged, or this version of redisacc did not write it.
    """
    with _opened(path) as (file, size, metadata, tensors, hashed):
        # A bytearray may be written to.
        data = memoryview(bytearray(size))
        file.readinto(data)
        hashed.update(data)
        _check(metadata, hashed)
        step = int(metadata["step"])
        if not -(2**63) <= step < 2**63:
            raise ValueError(f"step {step} is no int64")
        parameters = _tree(PARAMETERS, metadata, tensors, data)
        state = _tree(STATE, metadata, tensors, data) if STATE in metadata else None
        parse_kept(kept := metadata.get("kept", ""))
        return Checkpoint(metadata.get("name", ""), step, parameters, state, kept)


def _check(metadata: Mapping[str, str], hashed: Any) -> None:
    if metadata.get("format") != f"redisacc {FORMAT}":
        raise ValueError("it is no checkpoint of redisacc that this version reads")
    if hashed.hexdigest() != metadata.get(HASH):
        raise ValueError(f"its contents do not have the hash {metadata.get(HASH)}")


def _tree(what: str, metadata: Mapping[str, str], tensors: Mapping[str, Any], data: memoryview) -> Any:
    """Returns the parameters or the state.

    Raises:
        KeyError: a leaf is missing.
        ValueError: the metadata do not describe the leaves.
    """
    schema = Schema.parse(metadata[what])
    arrays = []
    for path, leaf in zip(schema.structure.paths, schema.leaves, strict=True):
        described = tensors[f"{what}/{path}"]
        first, last = described.pop("data_offsets")
        values = data[first:last]
        if described != _described(leaf) or len(values) != leaf.nbytes:
            raise ValueError(
                f"{path} has {len(values)} bytes and {described} instead of {leaf.nbytes} and {_described(leaf)}"
            )
        if leaf.dtype == "bool" and np.frombuffer(values, np.uint8).max(initial=0) > 1:
            raise ValueError(f"{path} holds bytes that are no booleans")
        arrays.append(np.frombuffer(values, leaf.stored).view(leaf.given).reshape(leaf.shape))
    return schema.structure.build(arrays)
