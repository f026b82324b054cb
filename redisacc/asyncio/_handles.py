"""What all handles of asyncio have in common: a blocking handle inside, whose methods are awaited.

The methods are made from the blocking class, so a new argument there is an argument here, for people and for
type checkers alike.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast

from redisacc import types
from redisacc.asyncio import _sharing
from redisacc.asyncio._waits import LoopWaits
from redisacc.errors import CancelledError, InvalidArgumentError

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Blocking = TypeVar("Blocking")

_END = object()


class Method(Protocol[P, R_co]):
    """A method with the arguments of a blocking one, as type checkers see it."""

    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[P, R_co]: ...

    def __call__(self, instance: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Handle(Generic[Blocking]):
    """A handle that ``await`` or ``async with`` opens.

    Args:
        kind: opens the blocking handle.
        arguments: its arguments by position.
        options: its arguments by name. ``redis`` leads to the server.
    """

    def __init__(self, kind: Callable[..., Blocking], *arguments: Any, **options: Any) -> None:
        self._kind = kind
        self._arguments = arguments
        self._where = options.pop("redis", None)
        self._options = options
        self._shared: _sharing.Shared | None = None
        self._handle: Blocking | None = None
        self._is_closed = False

    @property
    def blocking(self) -> Blocking:
        """The blocking handle inside."""
        if self._handle is None:
            raise InvalidArgumentError(
                f"this {type(self).__name__} is not open yet: use it in async with, or await it before its methods"
            )
        return self._handle

    @property
    def waits(self) -> LoopWaits:
        """How its calls wait."""
        assert self.blocking is not None
        assert self._shared is not None
        return self._shared.waits

    async def _open(self) -> Self:
        if self._handle is not None:
            return self
        if self._is_closed:
            raise CancelledError("this handle is closed")
        if self._shared is not None:
            raise InvalidArgumentError(f"another task is opening this {type(self).__name__}")
        shared = self._shared = _sharing.borrow(self._where)
        opens = functools.partial(self._kind, *self._arguments, redis=shared.transport, **self._options)
        try:
            self._handle = await shared.waits.run(opens)
        except BaseException:
            self._shared = None
            await _sharing.give_back(shared)
            raise
        # A handle that is dropped without being closed must not keep the connections open when all others are closed.
        self._finalizer = weakref.finalize(self, _sharing.drop, shared)
        self._finalizer.atexit = False
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the handle, as the blocking class does. Closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._handle is None or self._shared is None:
            return
        try:
            await self._shared.waits.run(self._handle.close)  # type: ignore[attr-defined]
        finally:
            self._finalizer.detach()
            await _sharing.give_back(self._shared)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a handle of redisacc.asyncio cannot be pickled or copied, because it belongs to an event loop: open "
            "another one by its name in the other process"
        )

    def __repr__(self) -> str:
        return f"asyncio.{self._handle!r}" if self._handle is not None else f"asyncio.{type(self).__name__}(not open)"


def awaited(method: Callable[Concatenate[Any, P], R]) -> Method[P, Coroutine[Any, Any, R]]:
    """Returns a method that awaits what a blocking one returns."""

    @_described(method, "Does what {} does, and is to be awaited.")
    async def call(self: Handle[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.waits.run(functools.partial(method, self.blocking, *args, **kwargs))

    return cast(Method[P, Coroutine[Any, Any, R]], call)


def entered(
    method: Callable[Concatenate[Any, P], AbstractContextManager[R]],
) -> Method[P, AbstractAsyncContextManager[R]]:
    """Returns a method for ``async with`` of a blocking one for ``with``."""

    @_described(method, "Does what {} does, for ``async with``.")
    def call(self: Handle[Any], *args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[R]:
        return _Block(self.waits, functools.partial(method, self.blocking, *args, **kwargs))

    return cast(Method[P, AbstractAsyncContextManager[R]], call)


def iterated(method: Callable[Concatenate[Any, P], Iterator[R]]) -> Method[P, AsyncIterator[R]]:
    """Returns a method for ``async for`` of a blocking one for ``for``."""

    @_described(method, "Does what {} does, for ``async for``.")
    def call(self: Handle[Any], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return Iteration(self.waits, functools.partial(method, self.blocking, *args, **kwargs))

    return cast(Method[P, AsyncIterator[R]], call)


def unchanged(method: Callable[Concatenate[Any, P], R]) -> Method[P, R]:
    """Returns the same method, which sends nothing and so need not wait."""

    @_described(method, "Does what {} does. It sends nothing, so there is nothing to await.")
    def call(self: Handle[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.blocking, *args, **kwargs)

    return cast(Method[P, R], call)


def opening(
    kind: Callable[P, object],
) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, P], None]]:
    """Makes a constructor, which needs no code, of the class of the blocking handle: it has the same arguments."""
    signature = inspect.signature(kind.__init__)

    def decorate(constructor: Callable[[Any], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(constructor)
        def construct(self: Handle[Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
            # Raises a TypeError here, and not where the handle is opened.
            signature.bind(self, *args, **kwargs)
            Handle.__init__(self, kind, *args, **kwargs)

        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct

    return decorate


def _described(method: Callable[..., Any], text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a method the name and the signature of a blocking one, and a description that refers to it."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(call, method, assigned=("__name__",), updated=())
        del call.__wrapped__  # type: ignore[attr-defined]
        call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        module = "redisacc.types" if method.__qualname__.partition(".")[0] in types.__all__ else "redisacc"
        call.__doc__ = text.format(f":meth:`{module}.{method.__qualname__}`")
        return call

    return decorate


class _Block(AbstractAsyncContextManager[R]):
    """A ``with`` block whose beginning and end are awaited."""

    def __init__(self, waits: LoopWaits, begin: Callable[[], AbstractContextManager[R]]) -> None:
        self._waits = waits
        self._block = begin()

    async def __aenter__(self) -> R:
        return await self._waits.run(self._block.__enter__)

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._waits.run(functools.partial(self._block.__exit__, *error))


class Iteration(AsyncIterator[R]):
    """A loop whose beginning and next value are awaited.

    Args:
        waits: how its calls wait.
        begin: makes the blocking iterator, before the first value.
    """

    def __init__(self, waits: LoopWaits, begin: Callable[[], Iterator[R]]) -> None:
        self._waits = waits
        self._begin = begin
        self._iterator: Any = None

    async def begun(self) -> Any:
        """Returns the blocking iterator, which it makes if it has not."""
        if self._iterator is None:
            self._iterator = await self._waits.run(self._begin)
        return self._iterator

    async def __anext__(self) -> R:
        value = await self._waits.run(functools.partial(next, await self.begun(), _END))
        if value is _END:
            raise StopAsyncIteration
        return cast(R, value)
