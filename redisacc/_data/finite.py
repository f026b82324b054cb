"""Refuses gradients with NaN or infinities."""

from __future__ import annotations

import numpy as np

from redisacc._data.gradient import Gradient, Section
from redisacc._data.spec import AccumulatorSpec
from redisacc._data.validation import Array
from redisacc.errors import NotFiniteError

# Elements that are looked at together: the truth values of so many stay in the processor's cache.
_AT_ONCE = 1 << 18


def check_finite(gradient: Gradient, spec: AccumulatorSpec) -> None:
    """Checks that all elements are finite: also those that became infinite when they were cast or added up.

    Args:
        gradient: a gradient that is not encoded.
        spec: what it is a gradient of.

    Raises:
        NotFiniteError: an element is infinite or NaN. The first one is named, in the order of the sections.
    """
    for number, (section, described) in enumerate(zip(gradient.sections, spec.sections, strict=True)):
        if described.dtype.is_integer:
            continue
        start = 0
        for array in section.arrays:
            place = _first_not_finite(array)
            if place is not None:
                raise _error(section, number, start + place, array.reshape(-1)[place], spec)
            start += array.size


def _first_not_finite(array: Array) -> int | None:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        finite = np.isfinite(flat[start : start + _AT_ONCE])
        if not np.logical_and.reduce(finite):
            return start + int(np.argmin(finite))
    return None


def _error(section: Section, number: int, place: int, value: object, spec: AccumulatorSpec) -> NotFiniteError:
    name, path = spec.name_of(number, place), spec.path_of(number, place)
    if section.indices is not None:
        row, element = divmod(place, max(section.size // len(section.indices), 1))
        inner = np.unravel_index(element, section.shape[1:])
        index = (int(section.indices[row]), *map(int, inner))
    else:
        first, shape = spec.extent_of(number, place)
        index = tuple(map(int, np.unravel_index(place - first, section.shape if shape is None else shape)))
    where = f"at {list(index)}" if index else "as its only element"
    return NotFiniteError(
        f"{name} must be finite, because the accumulator was opened with finite=True, but has {value} {where}: nothing "
        "was sent",
        path=path,
        index=index,
    )
