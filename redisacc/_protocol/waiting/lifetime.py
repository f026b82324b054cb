"""The lifetime of a handle: closing it wakes whatever waits on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from redisacc._text import shown
from redisacc._wire import forks
from redisacc._wire.waits import Alarm
from redisacc.errors import CancelledError


class Closing(ABC):
    """Is closed at the end of its ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Closes it. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a redisacc {type(self).__name__} cannot be pickled or copied, because its leases and connections belong "
            "to this process. Open it by its name in the other process, which is then a separate worker"
        )


class Lifetime:
    """Is open until it is closed, once and for all. Threads may share it.

    Args:
        name: the accumulator, as errors call it.

    Attributes:
        channels: the channels to which waits of the handle have listened. It may still be subscribed to them.
    """

    def __init__(self, name: str) -> None:
        self.channels: set[str] = set()
        self._name = name
        self._closed = forks.event()
        self._alarms: set[Alarm] = set()

    @property
    def closed(self) -> bool:
        """Whether the handle was closed."""
        return self._closed.is_set()

    def check(self) -> None:
        """Raises CancelledError if the handle was closed."""
        if self._closed.is_set():
            raise CancelledError(f"this handle on {shown(self._name)} is closed")

    def register(self, alarm: Alarm) -> Callable[[], None]:
        """Sets ``alarm`` when the handle is closed. Returns the function that takes this back."""
        self._alarms.add(alarm)
        return lambda: self._alarms.discard(alarm)

    def close(self) -> None:
        """Closes it, and wakes whatever waits on it."""
        self._closed.set()
        for alarm in list(self._alarms):
            alarm.set()
