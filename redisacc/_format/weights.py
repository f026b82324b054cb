"""Weights and staleness of gradients as text, and the rules that turn one into the other.

``lua/include/parse_weight.lua`` has the bounds as well, and ``lua/include/effective_weight.lua`` follows the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from redisacc._arrays.weights import CONSTANT, INVERSE_SQRT, LEAST_WEIGHT, MOST_WEIGHT
from redisacc._format.stored_text import parse_number

_WEIGHT = re.compile(r"[0-9][0-9.e+-]*")
_LONGEST = 24


# The largest max_staleness. A round's text has a pair for each staleness, and the scripts search it for every gradient.
MOST_STALENESS = 1000


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


def parse_staleness(text: str, num_accumulated: int, max_staleness: int | None = None) -> dict[int, int]:
    """Returns staleness → number of gradients, sorted by staleness.

    Args:
        text: the text that a script wrote; "" if staleness is not counted, because all gradients have 0.
        num_accumulated: the number of gradients in the round.
        max_staleness: the largest staleness that the accumulator accepts; None: not known here.

    Raises:
        ValueError: no script writes this, or not for this many gradients.
    """
    if not text:
        if num_accumulated and max_staleness:
            raise ValueError("the staleness of the gradients is missing")
        return {0: num_accumulated} if num_accumulated else {}
    found: dict[int, int] = {}
    for pair in text.split(","):
        staleness, _, number = pair.partition(":")
        late = parse_number(staleness)
        if late in found or number == "0":
            raise ValueError(f"{pair!r} is no number of gradients of a staleness")
        found[late] = parse_number(number)
    most = MOST_STALENESS if max_staleness is None else max_staleness
    if max(found) > most or sum(found.values()) != num_accumulated:
        raise ValueError(f"{num_accumulated} gradients cannot have this staleness")
    return dict(sorted(found.items()))
