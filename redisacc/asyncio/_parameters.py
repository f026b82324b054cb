"""Parameters for asyncio."""

from __future__ import annotations

from redisacc._handles import parameters
from redisacc.asyncio._handles import Handle, awaited, opening


class Parameters(Handle[parameters.Parameters]):
    """``redisacc.Parameters`` for asyncio, with the same arguments: a handle on parameters.

    ``async with`` or ``await`` opens it. ``redis`` is as for the accumulators. Tasks of one event loop may share it.
    """

    @opening(parameters.Parameters)
    def __init__(self) -> None: ...

    @property
    def shared_name(self) -> str:
        """The name under which other processes find the parameters."""
        return self.blocking.shared_name

    publish = awaited(parameters.Parameters.publish)
    check = awaited(parameters.Parameters.check)
    finish = awaited(parameters.Parameters.finish)
    step = awaited(parameters.Parameters.step)
    latest = awaited(parameters.Parameters.latest)
    wait = awaited(parameters.Parameters.wait)
    finished = awaited(parameters.Parameters.finished)
    is_complete = awaited(parameters.Parameters.is_complete)
    latest_state = awaited(parameters.Parameters.latest_state)
    history = awaited(parameters.Parameters.history)
    delete = awaited(parameters.Parameters.delete)
