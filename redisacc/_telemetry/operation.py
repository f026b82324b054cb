"""An operation as the code that carries it out describes it, whether or not anything records that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

from redisacc._telemetry.traceparent import TraceParent

Name = Literal["apply", "take", "recover", "compact", "publish", "wait"]


class Operation:
    """An operation that is not observed. It lasts for the length of a ``with`` block."""

    __slots__ = ()

    def __enter__(self) -> Operation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the operation, which has failed if there is an error."""

    @property
    def trace(self) -> str:
        """The text with which another process links the span of this operation; "" if nothing records it."""
        return ""

    def note_gradient(self, nbytes: int, local_step: int, outcome: str, global_step: int) -> None:
        """Notes whether a gradient that was sent was counted.

        Args:
            nbytes: the size of the gradient in bytes.
            local_step: the step that it was computed for.
            outcome: the outcome of the ``ApplyResult``.
            global_step: the accumulator's step after it.
        """

    def note_round(self, *, number: int, global_step: int, traces: Sequence[TraceParent]) -> None:
        """Notes a round that was received.

        Args:
            number: how many gradients it holds.
            global_step: the step that it closed.
            traces: the spans that applied them, as far as they are known.
        """

    def note(self, attribute: str, value: int) -> None:
        """Notes what else is known of it, as an attribute of its span."""


# What is observed where nothing records. A frequent operation that gets this one need not tell it anything.
NOT_OBSERVED = Operation()

# Returns an operation that begins with its ``with`` block, NOT_OBSERVED if nothing records. It gets what is done and,
# if it has a name, who does it: the worker, taker or publisher.
Observe = Callable[..., Operation]
