"""Gradients in files: a dense one as .npy, a sparse one as .npz with indices, values and shape."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np

from redisacc._arguments import Array
from redisacc._slices import IndexedSlices
from redisacc.cli._common import fail

# What numpy's files have no name for goes as the smallest type that holds it exactly.
_SAVED_AS = {"bfloat16": np.float32}


def check_output(output: Path | None, *, discard: bool, sparse: bool) -> None:
    """Refuses what can't be written, before anything is taken."""
    if (output is None) == (not discard):
        raise click.UsageError("give --output FILE, or --discard to throw the gradient away")
    if output is None or str(output) == "-":
        return
    if output.suffix not in (".npy", ".npz"):
        raise click.UsageError(f"--output must end in .npy or .npz, or be -, not {output.name!r}")
    if sparse and output.suffix != ".npz":
        raise click.UsageError("a sparse gradient goes into an .npz: indices, values, shape")
    if not os.access(output.absolute().parent, os.W_OK):
        raise click.UsageError(f"--output: no way to write into {output.absolute().parent}")


def save(gradient: Array | IndexedSlices, output: Path) -> None:
    """Writes a gradient, whole or not at all. "-" is standard output."""
    if str(output) == "-":
        buffer = io.BytesIO()
        _write(gradient, buffer, npz=isinstance(gradient, IndexedSlices))
        sys.stdout.buffer.write(buffer.getvalue())
        sys.stdout.buffer.flush()
        return
    npz = output.suffix == ".npz"
    with tempfile.NamedTemporaryFile(dir=output.absolute().parent, prefix=f".{output.name}.", delete=False) as file:
        try:
            _write(gradient, file, npz=npz)
            file.flush()
            # It must be there before the round is acknowledged, which removes it from the server.
            os.fsync(file.fileno())
            os.replace(file.name, output)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def _write(gradient: Array | IndexedSlices, file: Any, *, npz: bool) -> None:
    if isinstance(gradient, IndexedSlices):
        assert gradient.dense_shape is not None
        np.savez(file, indices=gradient.indices, values=_saved(np.asarray(gradient.values)), shape=gradient.dense_shape)
    elif npz:
        np.savez(file, gradient=_saved(gradient))
    else:
        np.save(file, _saved(gradient), allow_pickle=False)


def _saved(values: Array) -> Array:
    return values.astype(_SAVED_AS.get(values.dtype.name, values.dtype), copy=False)


def load(path: str) -> dict[str, Array]:
    """The arrays of a file, by name; of an .npy, "gradient". "-" is standard input. Never unpickles."""
    try:
        data: BinaryIO = io.BytesIO(sys.stdin.buffer.read()) if path == "-" else open(path, "rb")  # noqa: SIM115
        with data, contextlib.ExitStack() as stack:
            found = np.load(data, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"gradient": found}
            return dict(stack.enter_context(found).items())
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        fail(f"{path} is no file of arrays that can be read: {error}")


def picked(arrays: dict[str, Array], path: str, *names: str, optional: str | None = None) -> list[Array | None]:
    """The arrays of these names, and of no others."""
    known = [*names, *([optional] if optional else [])]
    missing = [name for name in names if name not in arrays]
    foreign = [name for name in arrays if name not in known]
    if missing or foreign:
        fail(f"{path} must hold {', '.join(names)}{f' and may hold {optional}' if optional else ''}; it holds "
             f"{', '.join(sorted(arrays)) or 'nothing'}")  # fmt: skip
    return [arrays.get(name) for name in known]
