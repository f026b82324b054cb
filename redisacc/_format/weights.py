"""Weights of gradients as text, and the rules that turn staleness into weights.

``lua/include/parse_weight.lua`` has the bounds as well, and ``lua/include/effective_weight.lua`` follows the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from redisacc._data.weights import CONSTANT, INVERSE_SQRT, LEAST_WEIGHT, MOST_WEIGHT

_WEIGHT = re.compile(r"[0-9][0-9.e+-]*")
_LONGEST = 24


def weight_text(weight: float) -> str:
    """Returns a weight as text, with the fewest digits that distinguish it from its neighbours."""
    return "1" if weight == 1 else repr(float(weight)).removesuffix(".0")


def parse_weight(text: str) -> float:
    """Returns the weight that a text holds.

    Raises:
        ValueError: it holds none.
    """
    if len(text) > _LONGEST or not _WEIGHT.fullmatch(text):
        raise ValueError(f"{text[:_LONGEST]!r} is not a weight")
    weight = float(text)
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"{text} is not in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}]")
    return weight


def rule_text(rule: str | Sequence[float]) -> str:
    """Returns a rule for weights of staleness as text: its name, or a factor for each staleness with commas between."""
    return rule if isinstance(rule, str) else ",".join(map(weight_text, rule))


def parse_rule(text: str, max_staleness: int) -> str | tuple[float, ...]:
    """Returns the rule for weights of staleness that a text holds.

    Args:
        text: what ``rule_text`` returned.
        max_staleness: the largest staleness that the accumulator accepts.

    Raises:
        ValueError: it holds none, or has another number of factors than there are values of staleness.
    """
    if text in (CONSTANT, INVERSE_SQRT):
        return text
    factors = tuple(map(parse_weight, text.split(",")))
    if len(factors) != max_staleness + 1:
        raise ValueError(f"it has {len(factors)} factors for a max_staleness of {max_staleness}")
    return factors
