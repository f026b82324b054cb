"""Adds the sections of a buffered gradient to sums, given its bytes, which are checked first."""

from __future__ import annotations

from typing import Any

import numpy as np

from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.sums import RoundSum, is_above
from redisacc._arrays.validation import Array
from redisacc._arrays.weights import LEAST_WEIGHT
from redisacc._format.buffered import WEIGHT, BufferedGradient, section_view
from redisacc._format.part_cut import BufferedSection
from redisacc.errors import CorruptDataError


def whole_gradient(gradient: BufferedGradient, data: Any, where: str) -> Gradient:
    """Returns a buffered gradient.

    Args:
        gradient: its description.
        data: all its bytes: memory of our own, or immutable bytes.
        where: the key of the bytes, for errors.

    Raises:
        CorruptDataError: its indices are not ascending, or its counts or the scale of a block are invalid.
    """
    ours = isinstance(data, np.ndarray)
    sections = [_checked(section, gradient, data, where, ours=ours) for section in gradient.sections]
    return Gradient(tuple(sections), gradient.number, gradient.weight, gradient.factor)


def add_sparse_sections(round_sum: RoundSum, gradient: BufferedGradient, data: Any, where: str) -> None:
    """Adds the sparse sections of a gradient, and does not count it.

    Args:
        round_sum: the sum.
        gradient: the description of the gradient.
        data: its bytes, at least those before the dense sections: memory of our own.
        where: the key of the bytes, for errors.

    Raises:
        CorruptDataError: its indices are not ascending, or its counts or the scale of a block are invalid.
    """
    for section, of in zip(gradient.sections, round_sum.sections, strict=True):
        if section.is_sparse:
            of.add(_checked(section, gradient, data, where, ours=True), gradient.factor)


def _checked(section: BufferedSection, gradient: BufferedGradient, data: Any, where: str, *, ours: bool) -> Section:
    """Returns a section of a gradient, checked."""
    found = section_view(section, data, where)
    indices, counts = found.indices, found.counts
    if indices is not None and len(indices):
        if indices[0] < 0 or not np.logical_and.reduce(indices[1:] > indices[:-1]):
            raise CorruptDataError(f"{where}: indices that are not ascending")
        if counts is not None:
            check_counts(counts, gradient, where)
    found.ours = ours
    return found


def check_counts(counts: Array, gradient: BufferedGradient, where: str) -> None:
    """Raises CorruptDataError unless each count of an index is possible in a sum of as many gradients."""
    if counts.dtype == WEIGHT:
        assert gradient.weight is not None
        right = (counts >= LEAST_WEIGHT) & ~is_above(counts, gradient.weight)
    else:
        right = (counts >= 1) & (counts <= gradient.number)
    if not right.all():
        raise CorruptDataError(f"{where}: counts of a sum of {gradient.number} gradients")
