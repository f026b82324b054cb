"""Refuses gradients with NaN or infinities."""

from __future__ import annotations

from typing import Any

import numpy as np

from redisacc._arrays.encodings import Encoding, first_not_finite
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec
from redisacc.errors import NotFiniteError


def check_finite(gradient: Gradient, spec: AccumulatorSpec, encoding: Encoding) -> None:
    """Checks that all elements are finite, and remain so on their way.

    Elements may have become infinite when they were cast or added up. With "bfloat16", a float32 whose magnitude
    is 3.3961775e38 or more is refused as well, because it would round to infinity. This does not depend on whether
    the gradient is small enough to travel as it is.

    Args:
        gradient: a gradient that is not encoded.
        spec: what it is a gradient of.
        encoding: how it travels.

    Raises:
        NotFiniteError: an element is not finite, or would not be. The first one is named, in the order of the sections.
    """
    for number, (section, described) in enumerate(zip(gradient.sections, spec.sections, strict=True)):
        if described.dtype.is_integer:
            continue
        rounds = encoding == "bfloat16" and section.dtype == np.float32
        found = first_not_finite(section, rounds=rounds)
        if found is not None:
            raise _error(section, number, *found, spec)


def _error(section: Section, number: int, place: int, value: Any, spec: AccumulatorSpec) -> NotFiniteError:
    leaf = spec.leaf_at(number, place)
    if section.indices is not None:
        row, element = divmod(place, max(section.size // len(section.indices), 1))
        inner = np.unravel_index(element, section.shape[1:])
        index = (int(section.indices[row]), *map(int, inner))
    else:
        shape = leaf.known_shape if leaf.path else section.shape
        index = tuple(map(int, np.unravel_index(place - leaf.start, shape)))
    where = f"at {list(index)}" if index else "as its only element"
    why = ", which encoding='bfloat16' rounds to infinity" if np.isfinite(value) else ""
    return NotFiniteError(
        f"{spec.name_of(number, place)} must be finite, because the option finite is set, but has "
        f"{value} {where}{why}: nothing was sent",
        path=leaf.path or None,
        index=index,
    )
