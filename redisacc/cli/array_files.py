"""Gradients in files of numpy: a dense one as .npy, a sparse one as .npz with indices, values and shape."""

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

from redisacc._data.slices import IndexedSlices
from redisacc._data.validation import Array
from redisacc.cli.failures import fail

# Types for which numpy's files have no name are saved as the smallest type that holds them exactly.
_SAVED_AS = {"bfloat16": np.float32}


def check_output(output: Path | None, *, discard: bool, sparse: bool) -> None:
    """Checks --output and --discard before anything is taken.

    Raises:
        click.UsageError: both or neither are given, or the file cannot be written or cannot hold the gradient.
    """
    if (output is None) == (not discard):
        raise click.UsageError("give either --output FILE or --discard, which throws the gradient away")
    if output is None or str(output) == "-":
        return
    if output.suffix not in (".npy", ".npz"):
        raise click.UsageError(f"--output must end in .npy or .npz, or be -, not {output.name!r}")
    if sparse and output.suffix != ".npz":
        raise click.UsageError(f"--output must end in .npz for a sparse gradient, which is three arrays, not "
                               f"{output.name!r}")  # fmt: skip
    if not os.access(output.absolute().parent, os.W_OK):
        raise click.UsageError(f"--output: the directory {output.absolute().parent} does not exist or is not writable")


def write_gradient(gradient: Array | IndexedSlices, output: Path) -> None:
    """Writes a gradient to a file, whole or not at all, and onto the disk before it returns; "-" is standard output."""
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
            # The caller acknowledges the round next, which removes it from the server.
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


def read_arrays(path: str) -> dict[str, Array]:
    """Returns the arrays of a file by name; the array of an .npy is "gradient". "-" is standard input.

    Never unpickles.

    Raises:
        Failure: the file cannot be read, or is none of numpy's.
    """
    try:
        data: BinaryIO = io.BytesIO(sys.stdin.buffer.read()) if path == "-" else open(path, "rb")  # noqa: SIM115
        with data, contextlib.ExitStack() as stack:
            found = np.load(data, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"gradient": found}
            return dict(stack.enter_context(found).items())
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        fail(f"{path} is not a readable .npy or .npz file: {error}")


def select_arrays(arrays: dict[str, Array], path: str, *names: str, optional: str | None = None) -> list[Array | None]:
    """Returns the arrays with these names; None for the optional one if it is absent.

    Raises:
        Failure: one is missing, or there are others.
    """
    known = [*names, *([optional] if optional else [])]
    missing = [name for name in names if name not in arrays]
    foreign = [name for name in arrays if name not in known]
    if missing or foreign:
        fail(f"{path} must hold {', '.join(names)}{f' and may hold {optional}' if optional else ''}; it holds "
             f"{', '.join(sorted(arrays)) or 'nothing'}")  # fmt: skip
    return [arrays.get(name) for name in known]
