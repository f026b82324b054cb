"""Observes operations with OpenTelemetry if its API is installed. Otherwise, nothing is observed."""

from __future__ import annotations

from redisacc._telemetry.operation import NOT_OBSERVED, Name, Observe, Operation

try:
    from redisacc._telemetry import spans
except ImportError:
    # opentelemetry-api is not installed, or too old.
    spans = None  # type: ignore[assignment]


def _observe_nothing(name: Name, client: str = "") -> Operation:  # noqa: ARG001 - as Observe has it
    return NOT_OBSERVED


class Telemetry:
    """Observes the operations of one handle.

    Args:
        kind: "dense", "sparse", "tree" or "parameters".
        name: the name in Redis.
        is_private: whether the name was made up.
        address: where the server is, without a password, as a transport says it.

    Attributes:
        observe: begins to observe an operation.
    """

    def __init__(self, kind: str, name: str, *, is_private: bool = False, address: str) -> None:
        self.observe: Observe = _observe_nothing
        if spans is not None:
            self.observe = spans.Target(kind, name, is_private=is_private, address=address).observe
