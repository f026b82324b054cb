"""Notes that travel with a gradient: metrics, which are named numbers such as the loss, and what a program keeps."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from redisacc._arrays.validation import unmasked
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# What a name may have: dashboards, Prometheus and redis-cli show it as it is.
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,64}", re.ASCII)
# A name and a value, as text.
_METRIC = re.compile(rb"([A-Za-z0-9_./-]{1,64})=(nan|-?inf|-?[0-9.e+-]{1,24})", re.ASCII)
# As `metric_notes` writes them: these two, and the weight of the gradient.
_NOTE = re.compile(_METRIC.pattern + rb"\*([0-9.e+-]{1,24})", re.ASCII)

# A gradient has at most this many metrics, and their notes have at most this many bytes together.
MOST_METRICS = 32
MOST_BYTES = 768

# The value that a program keeps has at most this many bytes, as JSON without spaces. Its note and the note of a digest
# begin with signs that no metric's name has.
MOST_KEPT = 1024
_KEPT = "="
_DIGEST = re.compile(rb"~([0-9a-f]{16})", re.ASCII)


def metric_notes(metrics: object, weight: float) -> str:
    """Returns the notes of a gradient, separated by spaces, as they are stored with its worker.

    Args:
        metrics: a dict from names to numbers; ``Means`` if the program keeps something. None means there are none.
        weight: the weight of the gradient.

    Raises:
        InvalidArgumentError: they are no such dict, or too many.
    """
    if metrics is None:
        return ""
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics must be a dict from names to numbers, not {shown(metrics)}")
    if len(metrics) > MOST_METRICS:
        raise InvalidArgumentError(f"metrics must have at most {MOST_METRICS} names, not {len(metrics)}")
    text = " ".join([f"{metric_name(name)}={_checked(name, value)!r}*{weight!r}" for name, value in metrics.items()])
    if len(text) > MOST_BYTES:
        raise InvalidArgumentError(
            f"metrics must have at most {MOST_BYTES} bytes in all, with their names and values as text, not {len(text)}"
        )
    if isinstance(metrics, Means):
        text += f" ~{metrics.digest}" * bool(metrics.digest) + f" {_KEPT}{metrics.kept}" * bool(metrics.kept)
    return text.lstrip()


def metric_name(name: object) -> str:
    """Returns the name of a metric.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidArgumentError(
            f"the name of a metric must be 1 to 64 ASCII letters, digits, or any of _ . / -, not {shown(name)}"
        )
    return name


def _checked(name: str, value: object) -> float:
    """Returns a value as a float: a number, or an array of another library that has one element."""
    unmasked(value, f"metric {name}")
    if not isinstance(value, numbers.Real):
        item = getattr(value, "item", None)
        # An array with more elements raises an error of its own library.
        try:
            value = item() if callable(item) else value
        except Exception as error:
            raise InvalidArgumentError(f"metric {name} must be a single number, not {shown(value)}") from error
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"metric {name} must be a number, not {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidArgumentError(f"metric {name} is too large for a float of 64 bits: {shown(value)}") from error


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Returns means as text, "NAME=VALUE" each, separated by spaces. The last names are left out beyond 768 bytes."""
    text = ""
    for name, value in metrics.items():
        note = f"{name}={value!r}"
        if len(text) + len(note) >= MOST_BYTES:
            break
        text += f" {note}" if text else note
    return text


def parse_metrics(text: bytes) -> dict[str, float]:
    """Parses what ``metrics_text`` returns.

    Raises:
        ValueError: this is something else.
    """
    if len(text) > MOST_BYTES:
        raise ValueError("the text is too long")
    metrics = {}
    for note in text.split():
        found = _METRIC.fullmatch(note)
        if found is None:
            raise ValueError("a name or a value is none")
        metrics[found[1].decode()] = float(found[2])
    return metrics


class Means(dict[str, float]):
    """The mean of each metric of a round, by name, or the metrics of one gradient.

    Attributes:
        ranges: the smallest and the largest value of each metric whose values are not all the same.
        kept: what the program keeps, as ``kept_text`` makes it; "": this brings nothing new.
        digest: the digest of the gradient, 16 hexadecimal digits; of a round, one that two of its gradients have; "":
            there is none.
    """

    ranges: Mapping[str, tuple[float, float]] = MappingProxyType({})
    digest: str = ""
    kept: str = ""


def mean_metrics(notes: Iterable[bytes]) -> Means:
    """Returns the mean of each metric by weight, over the gradients that have it, sorted by name.

    A mean is at least the smallest value and at most the largest, also in its last bit: that of equal values is one of
    them.

    Args:
        notes: the notes of all gradients of a round, in the order in which they are added. What is not the note of a
            metric is left out: any client may have written it.
    """
    sums: dict[str, tuple[float, float, float, float]] = {}
    kept, digests, repeated = "", set[bytes](), b""
    for note in notes:
        if digest := _DIGEST.fullmatch(note):
            repeated = repeated or digest[1] * (digest[1] in digests)
            digests.add(digest[1])
            continue
        if note.startswith(_KEPT.encode()) and not kept:
            with suppress(ValueError):
                text = note[1:].decode("ascii")
                parse_kept(text)
                kept = text
            continue
        found = _NOTE.fullmatch(note)
        if found is None:
            continue
        try:
            value, weight = float(found[2]), float(found[3])
        except ValueError:
            continue
        if not 0 < weight < math.inf or (len(sums) == MOST_METRICS and found[1].decode() not in sums):
            continue
        total, whole, low, high = sums.get(found[1].decode(), (0.0, 0.0, value, value))
        sums[found[1].decode()] = total + weight * value, whole + weight, min(low, value), max(high, value)
    # In this order: NaN stays NaN.
    means = Means(
        {name: min(max(total / whole, low), high) for name, (total, whole, low, high) in sorted(sums.items())}
    )
    means.ranges = {name: (low, high) for name, (_, _, low, high) in sums.items() if low != high}
    means.kept, means.digest = kept, repeated.decode()
    return means


def kept_text(value: object) -> str:
    """Returns what a program keeps as JSON in ASCII, without spaces.

    Raises:
        InvalidArgumentError: it holds something else than numbers, texts, lists and dicts, or it is too long.
    """
    try:
        text = json.dumps(_kept(value, "value"), separators=(",", ":")).replace(" ", r"\u0020")
    except RecursionError:
        raise InvalidArgumentError("value must not be nested so deeply, or contain itself") from None
    if len(text) > MOST_KEPT:
        raise InvalidArgumentError(
            f"value must have at most {MOST_KEPT} bytes as JSON, not {len(text)}: it is for numbers and short texts, "
            "and arrays belong in the state or in a file"
        )
    return text


def _kept(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgumentError(f"{path} must have texts as keys, not {shown(key)}")
        return {key: _kept(each, f"{path}[{shown(key)}]") for key, each in value.items()}
    if type(value) is list:
        return [_kept(each, f"{path}[{n}]") for n, each in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        f"{path} must be None, True, False, a number, a text, or a list or dict of these, not {type(value).__name__}"
    )


def parse_kept(text: str) -> Any:
    """Returns what a program keeps, given its text; None if that is empty.

    Raises:
        ValueError: it is no such text.
    """
    if len(text) > MOST_KEPT or " " in text:
        raise ValueError("it is too long, or has spaces")
    try:
        return json.loads(text) if text else None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
