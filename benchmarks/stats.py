"""Computes medians, spread and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Returns number, median, quartiles and extremes of some values."""
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return {
        "n": len(values),
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
        "min": float(min(values)),
        "max": float(max(values)),
    }


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles of the ratios of neighboring rounds, and the ratio of the two medians."""
    pairs = [a / b for a, b in zip(slower, faster, strict=False)]
    q1, median, q3 = np.percentile(pairs, [25, 50, 75])
    return {
        "of_medians": float(np.median(slower) / np.median(faster)),
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
    }


def inverse(ratio: dict[str, Any]) -> dict[str, Any]:
    """Returns the same ratio seen from the other side."""
    swapped = {"q1": "q3", "q3": "q1"}
    return {swapped.get(name, name): 1 / value for name, value in ratio.items()}
