"""The error that differs under asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from redisacc import errors


class OutcomeUnknownError(errors.OutcomeUnknownError):
    """A ``redisacc.OutcomeUnknownError`` whose ``settle()`` is awaited."""

    def __init__(
        self, message: str, settle: Callable[[], Any], run: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
    ) -> None:
        super().__init__(message, settle)
        self._run: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]] | None = run

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_run": None}

    async def settle(self) -> Any:
        """Settles the request: sends it again until it is certain that it was executed, or never will be.

        The request is executed only once, even if several copies arrive, or a late one.

        Returns:
            The return value of the method that raised this error.

        Raises:
            OutcomeUnknownError, RedisAccError, RuntimeError: as ``redisacc.OutcomeUnknownError.settle``.
        """
        return super().settle() if self._run is None else await self._run(super().settle)
