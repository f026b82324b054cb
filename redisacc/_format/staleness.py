"""The staleness of the gradients of a round, as scripts write it: "staleness:number" pairs, separated by commas."""

from __future__ import annotations

# The largest max_staleness. A round's text has a pair for each staleness, and the scripts search it for every gradient.
MOST_STALENESS = 1000

_MOST_DIGITS = 15


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
        if not (_is_number(staleness) and _is_number(number)) or int(staleness) in found or number == "0":
            raise ValueError(f"{pair!r} is no number of gradients of a staleness")
        found[int(staleness)] = int(number)
    most = MOST_STALENESS if max_staleness is None else max_staleness
    if max(found) > most or sum(found.values()) != num_accumulated:
        raise ValueError(f"{num_accumulated} gradients cannot have this staleness")
    return dict(sorted(found.items()))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
