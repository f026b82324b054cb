"""Gradients in files of numpy: one array as .npy, several as .npz.

A dense gradient is the array ``gradient``. A sparse one is ``indices``, ``values`` and ``shape``. Of a tree, a dense
leaf is the array of its path, and a sparse leaf is three arrays: ``PATH/indices``, ``PATH/values`` and ``PATH/shape``.
A leaf without a gradient is left out.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from numpy.lib import format as numpy_format

from redisacc._arrays.results import ApplyResult
from redisacc._arrays.spec import Leaf
from redisacc._arrays.validation import Array
from redisacc._checkpoints.file import replaced_file
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._text import listed, shown
from redisacc.tools.cli.shared.failures import USAGE, fail, refuse

# What an .npy, which holds one array, cannot hold.
_SEVERAL = {"tree": "a tree, which is several arrays", "sparse": "a sparse gradient, which is three arrays"}

# Types for which numpy's files have no name are saved as the smallest type that holds them exactly.
_SAVED_AS = {"bfloat16": np.float32}

# How many names of other arrays a message lists.
_LISTED = 8
# An archive may unpack to this many bytes, or to this many times its own size if that is more.
_MAX_UNPACKED, _MAX_RATIO = 2**30, 10


class GradientFiles:
    """Writes gradients of one accumulator to files, and reads and applies them.

    Args:
        accumulator: the accumulator.

    Raises:
        click.UsageError: no file can hold its gradients.
    """

    def __init__(self, accumulator: ConditionalAccumulatorBase[Any]) -> None:
        self._accumulator: Any = accumulator
        self._spec = accumulator._spec
        self._kind = self._spec.kind
        # The names of the arrays of each leaf.
        self._leaves = [(leaf.path, _names_of(leaf)) for leaf in self._spec.leaves]
        self._names = [name for _, names in self._leaves for name in names]
        self._check_names()

    def _check_names(self) -> None:
        owners: dict[str, str] = {}
        for path, names in self._leaves:
            for name in names:
                # numpy.load cannot tell the array "a.npy" from the file of the array "a".
                for taken in (name, f"{name}.npy", name.removesuffix(".npy")):
                    if taken in owners:
                        raise click.UsageError(
                            f"a file cannot hold this tree, because the names of the arrays of its leaves "
                            f"{shown(owners[taken])} and {shown(path)} would be confused; use Python instead"
                        )
                owners[name] = path

    def check(self, output: Path) -> None:
        """Raises a click.UsageError if a file cannot be written, or cannot hold a gradient."""
        if str(output) == "-":
            return
        refuse(
            output.suffix not in (".npy", ".npz"), f"--output must end in .npy or .npz, or be -, not {output.name!r}"
        )
        refuse(
            self._kind in _SEVERAL and output.suffix != ".npz",
            f"--output must end in .npz for {_SEVERAL.get(self._kind)}, not {output.name!r}",
        )
        folder = output.absolute().parent
        refuse(not os.access(folder, os.W_OK), f"--output: the directory {folder} does not exist or is not writable")

    def write(self, gradient: Any, output: Path) -> None:
        """Writes a gradient to a file, whole or not at all, and onto the disk before it returns; "-" is stdout."""
        arrays: dict[str, Array] = {}
        leaves = self._spec.structure.leaves_of(gradient, "the gradient")
        for (_, names), leaf in zip(self._leaves, leaves, strict=True):
            if leaf is not None:
                pieces = (leaf,) if len(names) == 1 else (leaf.indices, leaf.values, leaf.dense_shape)
                arrays.update(zip(names, map(np.asanyarray, pieces), strict=True))
        write_arrays(arrays, output, several=self._kind in _SEVERAL)

    def apply(self, file: str, local_step: int | None, weight: float) -> tuple[int, ApplyResult]:
        """Applies the gradient in a file.

        Args:
            file: the file; "-" is standard input.
            local_step: the step that the gradient was computed for; None means the current one.
            weight: the weight of the gradient.

        Returns:
            The step, and the outcome.

        Raises:
            Failure: the file cannot be read, or its arrays are not a gradient's.
        """
        arrays = read_arrays(file, self._names, single=None if self._kind in _SEVERAL else self._names[0])
        leaves = [self._leaf(arrays, file, path, names) for path, names in self._leaves]
        step = self._accumulator.global_step() if local_step is None else local_step
        if self._kind != "tree" and leaves[0] is None:
            fail(f"{file} must hold {' and '.join(self._names[:2])}; it holds nothing of them", USAGE)
        gradient = leaves[0] if self._kind == "sparse" else [self._spec.structure.build(leaves)]
        return step, self._accumulator.apply_grad(*gradient, step, weight=weight)

    def _leaf(self, arrays: Mapping[str, Array], file: str, path: str, names: Sequence[str]) -> Any:
        """Returns the gradient of a leaf, given the arrays of a file; None if it has none."""
        found = [arrays.get(name) for name in names]
        if len(found) == 1:
            return found[0]
        indices, values, shape = found
        if (indices is None) != (values is None) or (indices is None and shape is not None):
            of = f"the sparse leaf {shown(path)}, or nothing of it" if path else "a sparse gradient"
            fail(f"{file} must hold both the indices and the values of {of}", USAGE)
        # For an unknown dimension 0, `take` writes -1, which cannot be checked.
        is_open = shape is not None and bool(shape.size) and shape.flat[0] == -1
        return None if indices is None else (indices, values, None if is_open else shape)


def _names_of(leaf: Leaf) -> tuple[str, ...]:
    if not leaf.is_sparse:
        return (leaf.path or "gradient",)
    return tuple(f"{leaf.path}/{piece}" if leaf.path else piece for piece in ("indices", "values", "shape"))


def write_arrays(arrays: Mapping[str, Array], output: Path, *, several: bool) -> None:
    """Writes arrays to a file, whole or not at all, and onto the disk before it returns.

    Args:
        arrays: the arrays, by name.
        output: the file, an .npy or .npz by its name; "-" is standard output.
        several: whether standard output gets an .npz; otherwise it gets the only array, as an .npy.
    """
    if str(output) == "-":
        buffer = io.BytesIO()
        _write(arrays, buffer, npz=several)
        sys.stdout.buffer.write(buffer.getvalue())
        sys.stdout.buffer.flush()
        return
    # On the disk, because the caller acknowledges the round next, which removes it from the server.
    with replaced_file(output) as file:
        _write(arrays, file, npz=output.suffix == ".npz")


def _write(arrays: Mapping[str, Array], file: Any, *, npz: bool) -> None:
    if not npz:
        (array,) = arrays.values()
        np.save(file, _saved(array), allow_pickle=False)
        return
    # As numpy.savez does, which cannot save an array with the name "file".
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                numpy_format.write_array(member, np.asanyarray(_saved(array)), allow_pickle=False)


def _saved(values: Array) -> Array:
    return values.astype(_SAVED_AS.get(values.dtype.name, values.dtype), copy=False)


def read_arrays(path: str, names: Container[str], *, single: str | None) -> dict[str, Array]:
    """Returns the arrays of a file by name. Never unpickles.

    Args:
        path: the file; "-" is standard input.
        names: the names that arrays may have there.
        single: the name of the array of an .npy; None means the file must be an .npz.

    Raises:
        Failure: the file cannot be read, is none of numpy's, or its arrays are not a gradient's.
    """
    try:
        data: BinaryIO = io.BytesIO(sys.stdin.buffer.read()) if path == "-" else open(path, "rb")  # noqa: SIM115
        with data:
            if not data.seekable():
                # A pipe, for example of a shell's <(…).
                data = io.BytesIO(data.read())
            size = data.seek(0, os.SEEK_END)
            data.seek(0)
            found = np.load(data, allow_pickle=False)
            if isinstance(found, np.ndarray):
                if single is None:
                    raise _UnknownArraysError("one array without a name")
                return {single: found}
            _check_archive(found.zip, size, names)
            return {name: found[name] for name in found.files}
    except _UnknownArraysError as error:
        fail(f"{path} must hold the arrays of a gradient; it holds {error}", USAGE)
    except MemoryError:
        fail(f"{path} does not fit into the memory of this machine", USAGE)
    except Exception as error:  # noqa: BLE001 - on a damaged file, numpy, zipfile and zlib raise anything
        fail(f"{path} is not a readable .npy or .npz file: {shown(error)}", USAGE)


class _UnknownArraysError(Exception):
    """A file holds arrays that no gradient has."""


def _check_archive(archive: zipfile.ZipFile, size: int, known: Container[str]) -> None:
    """Checks the names and sizes in an archive before anything is unpacked. A damaged one may list thousands."""
    members = archive.infolist()
    names = [member.filename.removesuffix(".npy") for member in members]
    foreign = [name for name in names if name not in known]
    if foreign or len(set(names)) < len(names):
        raise _UnknownArraysError(listed(foreign or names, _LISTED, shown))
    claimed = sum(member.file_size for member in members)
    if claimed > max(_MAX_UNPACKED, size * _MAX_RATIO):
        raise ValueError(f"its {size} bytes claim to unpack to {claimed}")
