"""Observes operations with OpenTelemetry if its API is installed. Otherwise, nothing is observed."""

from __future__ import annotations

from redisacc._telemetry.operation import NOT_OBSERVED, Observe

try:
    from redisacc._telemetry import spans
except ImportError:
    # opentelemetry-api is not installed, or too old.
    spans = None  # type: ignore[assignment]


def observer(kind: str, name: str, *, is_private: bool = False, address: str) -> Observe:
    """Returns what begins to observe an operation of one handle.

    Args:
        kind: "dense", "sparse", "tree" or "parameters".
        name: the name in Redis.
        is_private: whether the name was made up.
        address: where the server is, without a password, as a transport says it.
    """
    if spans is None:
        return lambda *_: NOT_OBSERVED
    return spans.Target(kind, name, is_private=is_private, address=address).observe
