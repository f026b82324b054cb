"""Observes operations with OpenTelemetry if its API is installed. Otherwise, nothing is observed."""

from __future__ import annotations

from redisacc._telemetry.operation import Name, Operation

try:
    from redisacc._telemetry import spans
except ImportError:
    # opentelemetry-api is not installed, or too old.
    spans = None  # type: ignore[assignment]

_NOT_OBSERVED = Operation()


class Telemetry:
    """Observes the operations of one handle.

    Args:
        kind: "dense", "sparse", "tree" or "parameters".
        name: the name in Redis.
        is_private: whether the name was made up.
        address: where the server is, without a password, as a transport says it.
    """

    def __init__(self, kind: str, name: str, *, is_private: bool = False, address: str) -> None:
        self._target = None
        if spans is not None:
            self._target = spans.Target(kind, name, is_private=is_private, address=address)

    def observe(self, name: Name, client: str = "") -> Operation:
        """Returns an operation that begins with its ``with`` block.

        Args:
            name: what is done.
            client: the name of the worker, taker or publisher that does it.
        """
        if self._target is None:
            return _NOT_OBSERVED
        return spans.ObservedOperation(name, self._target, client)
