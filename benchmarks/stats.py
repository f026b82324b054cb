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
    """Returns the ratio of two medians, and the quartiles of the ratios of neighbouring rounds."""
    pairs = [a / b for a, b in zip(slower, faster, strict=False)]
    q1, q3 = np.percentile(pairs, [25, 75])
    return {"of_medians": float(np.median(slower) / np.median(faster)), "q1": float(q1), "q3": float(q3)}
