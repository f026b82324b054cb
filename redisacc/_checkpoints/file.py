"""A checkpoint is one file in the format of safetensors: a tensor for each leaf of the parameters and of the state.

It is one file, so that parameters, state and step can never be of different moments: a single rename makes all of them
visible. Tensors have the names ``parameters/PATH`` and ``state/PATH``, so torch, JAX and others can read them. The
metadata hold what the format lacks: the step, and both trees with their dtypes, in the text that Redis holds as well.

The library reads no bfloat16 into numpy, and knows neither complex128 nor quantised types. So it reads bytes here, and
the trees say what they are. complex128 is stored as pairs of float64, and quantised integers as integers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.leaves import Leaf, Schema
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._text import shown
from redisacc.errors import CorruptDataError

FORMAT = "1"

PARAMETERS, STATE = "parameters", "state"

_COMPLEX128 = np.dtype(np.complex128)


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a training.

    Attributes:
        name: the name of the training.
        step: the step of its parameters.
        parameters: the tree.
        state: the chief's state, a tree or None.
    """

    name: str
    step: int
    parameters: Any
    state: Any


def library() -> Any:
    """Returns the library that knows the format.

    Raises:
        ImportError: it is not installed. The message says what to install.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("checkpoints need the library safetensors: pip install 'redisacc[checkpoint]'") from error
    return safetensors


def write_file(path: Path, checkpoint: Checkpoint) -> tuple[int, str]:
    """Writes a checkpoint, so that after a crash at any moment there is the whole file under this name, or none.

    A file that is there is replaced.

    Returns:
        The size of the file in bytes, and the SHA-256 hash of its contents, in hexadecimal.

    Raises:
        OSError: it cannot be written. Nothing of it is left.
    """
    safetensors = library()
    metadata = {"format": f"redisacc {FORMAT}", "name": checkpoint.name, "step": str(checkpoint.step)}
    tensors: dict[str, Array] = {}
    for what, tree in ((PARAMETERS, checkpoint.parameters), (STATE, checkpoint.state)):
        if tree is None and what == STATE:
            continue
        schema, arrays = schema_of(tree, what)
        metadata[what] = schema.text
        for leaf_path, leaf, values in zip(schema.structure.paths, schema.leaves, arrays, strict=True):
            tensors[f"{what}/{leaf_path}"] = _tensor(leaf, values)
    with replaced_file(path) as temporary:
        safetensors.numpy.save_file(tensors, temporary, metadata)
        digest = hash_of(temporary)
    return path.stat().st_size, digest


@contextlib.contextmanager
def replaced_file(path: Path) -> Any:
    """Yields the path of a temporary file in the same folder, which takes the place of ``path`` when the block ends."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Without this, the machine may forget the new name in a power failure.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hash_of(path: Path) -> str:
    """Returns the SHA-256 hash of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path) -> Checkpoint:
    """Returns the checkpoint in a file. Its arrays are the caller's own.

    Raises:
        OSError: the file cannot be read.
        CorruptDataError: the file is damaged, or redisacc did not write it.
    """
    safetensors = library()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        found = {name: tensor["data"] for name, tensor in safetensors.deserialize(path.read_bytes())}
    except safetensors.SafetensorError as error:
        raise CorruptDataError(f"{path} is damaged, or no file of safetensors: {shown(str(error))}") from None
    if metadata.get("format") != f"redisacc {FORMAT}":
        raise CorruptDataError(f"{path} is no checkpoint of redisacc that this version reads")
    try:
        step = int(metadata["step"])
        if not -(2**63) <= step < 2**63:
            raise ValueError(f"step {step} is no int64")
        parameters = _tree(PARAMETERS, metadata, found)
        state = _tree(STATE, metadata, found) if STATE in metadata else None
    except (KeyError, ValueError) as error:
        raise CorruptDataError(f"{path} is damaged: {shown(str(error))}") from None
    return Checkpoint(metadata.get("name", ""), step, parameters, state)


def _tensor(leaf: Leaf, values: Array) -> Array:
    """Returns the array that the library stores for a leaf."""
    stored = np.ascontiguousarray(leaf.bytes_of(values)).view(leaf.stored.newbyteorder("="))
    if stored.dtype == _COMPLEX128:
        return stored.view(np.float64).reshape(*leaf.shape, 2)
    return stored.reshape(leaf.shape)


def _tree(what: str, metadata: Mapping[str, str], found: Mapping[str, bytearray]) -> Any:
    """Returns the parameters or the state.

    Raises:
        KeyError: a leaf is missing.
        ValueError: the metadata do not describe the leaves.
    """
    schema = Schema.parse(metadata[what])
    arrays = []
    for path, leaf in zip(schema.structure.paths, schema.leaves, strict=True):
        data = found[f"{what}/{path}"]
        if len(data) != leaf.nbytes:
            raise ValueError(f"{path} has {len(data)} bytes instead of {leaf.nbytes}")
        if leaf.dtype == "bool" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
            raise ValueError(f"{path} holds bytes that are no booleans")
        # A bytearray may be written to.
        arrays.append(np.frombuffer(data, leaf.stored).view(leaf.given).reshape(leaf.shape))
    return schema.structure.build(arrays)
