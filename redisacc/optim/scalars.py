"""The numbers of a step as text, which keeps all of their bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redisacc._text import shown
from redisacc.optim.base import Optimizer, Scalars
from redisacc.optim.options import hex_text, parse_hex

# The longest text of a number, with what separates it from the next.
_LONGEST = 26


def pack_scalars(every: Sequence[Scalars]) -> str:
    """Returns the numbers of each group as text: ``Optimizer.scalars`` makes sure that they are finite."""
    return ";".join(",".join(map(hex_text, scalars)) for scalars in every)


def unpack_scalars(text: str, optimizer: Optimizer) -> tuple[Scalars, ...]:
    """Returns the numbers of each group from text.

    Args:
        text: what ``pack_scalars`` returned.
        optimizer: what they belong to, which determines how many there are.

    Raises:
        ValueError: redisacc did not write this text for such an optimizer.
    """
    groups, width = optimizer.num_groups, optimizer.scalars_per_group
    if len(text) > groups * width * _LONGEST:
        raise ValueError(f"the numbers of a step must be {groups * width} numbers, not {len(text)} characters")
    every = tuple(tuple(map(parse_hex, group.split(","))) for group in text.split(";"))
    if len(every) != groups or any(len(scalars) != width for scalars in every):
        raise ValueError(
            f"the numbers of a step must be {width} for each of {groups} groups of {optimizer.name}, unlike "
            f"{shown(text)}"
        )
    return every


def pack_scale(scale: float) -> str:
    """Returns the scale of a clipping as text: a number in [0, 1], or NaN."""
    return "nan" if math.isnan(scale) else hex_text(scale)


def unpack_scale(text: str) -> float:
    """Returns the scale of a clipping from text.

    Raises:
        ValueError: ``pack_scale`` did not write this text.
    """
    if text == "nan":
        return math.nan
    scale = parse_hex(text, "the scale of a clipping")
    if not 0 <= scale <= 1:
        raise ValueError(f"the scale of a clipping must be in [0, 1], not {scale:g}")
    return scale
