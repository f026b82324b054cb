"""The loop of a run for asyncio."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from redisacc._training import chief, training, upload, worker
from redisacc.asyncio._handles import Handle, awaited, iterated, opening, unchanged
from redisacc.asyncio._waits import LoopWaits

Blocking = TypeVar("Blocking", bound=chief.Chief | worker.Worker | training.Training)
Working = TypeVar("Working", bound=worker.Worker | training.Training)


class Upload:
    """A gradient whose leaves are put one by one, as ``redisacc.types.Upload``, for asyncio.

    ``Worker.begin`` and ``Training.begin`` return it. Parts are sent while other tasks run.
    """

    def __init__(self, blocking: upload.Upload, waits: LoopWaits) -> None:
        self.blocking = blocking
        self.waits = waits

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.abandon()

    put = unchanged(upload.Upload.put)
    commit = awaited(upload.Upload.commit)
    abandon = awaited(upload.Upload.abandon)


class _OfTraining(Handle[Blocking]):
    @property
    def shared_name(self) -> str:
        """The name of the run."""
        return self.blocking.shared_name


class _Working(_OfTraining[Working]):
    async def begin(self) -> Upload:
        """Does what :meth:`redisacc.Worker.begin` does. Await it."""
        return Upload(await self.waits.run(self.blocking.begin), self.waits)


class Chief(_OfTraining[chief.Chief]):
    """``redisacc.Chief`` for asyncio, with the same arguments: the chief of a run.

    ``async with`` or ``await`` opens it. ``redis`` is as for the accumulators. A thread extends its lease, so a step
    that blocks the event loop does not lose it.
    """

    @opening(chief.Chief)
    def __init__(self) -> None: ...

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.blocking.workers

    @property
    def step(self) -> int:
        """The step of the parameters, which is the step of the next round."""
        return self.blocking.step

    @property
    def parameters(self) -> Any:
        """The parameters of that step: your own arrays if you have published them, else copies."""
        return self.blocking.parameters

    @property
    def state(self) -> Any:
        """The state that was published with them, or None."""
        return self.blocking.state

    @property
    def metrics(self) -> dict[str, float]:
        """In a loop over ``updates()``: the mean of each metric of the gradients of the last update."""
        return self.blocking.metrics

    rounds = iterated(chief.Chief.rounds)
    updates = iterated(chief.Chief.updates)
    latest = awaited(chief.Chief.latest)
    latest_state = awaited(chief.Chief.latest_state)
    history = awaited(chief.Chief.history)
    publish = awaited(chief.Chief.publish)
    finish = awaited(chief.Chief.finish)
    delete = awaited(chief.Chief.delete)


class Worker(_Working[worker.Worker]):
    """``redisacc.Worker`` for asyncio, with the same arguments: a worker of a run.

    ``async with`` or ``await`` opens it. ``redis`` is as for the accumulators. A thread extends its lease, so a step
    that blocks the event loop does not lose it.
    """

    @opening(worker.Worker)
    def __init__(self) -> None: ...

    @property
    def number(self) -> int:
        """The number of this worker."""
        return self.blocking.number

    async def workers(self) -> int:
        """Returns how many workers there are, as ``redisacc.Worker.workers`` says.

        Waits for a round trip, or until a chief has begun the run. In a loop over ``steps()``, it is read again in each
        step in which you call this.
        """
        return await self.waits.run(lambda: self.blocking.workers)

    steps = iterated(worker.Worker.steps)
    apply = awaited(worker.Worker.apply)
    skip = awaited(worker.Worker.skip)

    as_encoded = awaited(worker.Worker.as_encoded)


class Training(_Working[training.Training]):
    """``redisacc.Training`` for asyncio, with the same arguments: a run in which all processes are the same.

    ``async with`` or ``await`` opens it. ``redis`` is as for the accumulators. A thread leads, so a step that blocks
    the event loop does not delay other processes.
    """

    @opening(training.Training)
    def __init__(self) -> None: ...

    @property
    def number(self) -> int | None:
        """The number of this worker. None in a process that only leads."""
        return self.blocking.number

    @property
    def leads(self) -> bool:
        """Whether this process leads at the moment."""
        return self.blocking.leads

    async def workers(self) -> int:
        """Returns how many workers there are, as ``redisacc.Training.workers`` says."""
        return await self.waits.run(lambda: self.blocking.workers)

    async def finished(self) -> bool:
        """Returns whether the run is finished, as ``redisacc.Training.finished`` says."""
        return await self.waits.run(lambda: self.blocking.finished)

    steps = iterated(training.Training.steps)
    apply = awaited(training.Training.apply)
    skip = awaited(training.Training.skip)

    keep = awaited(training.Training.keep)
    kept = awaited(training.Training.kept)
    latest = awaited(training.Training.latest)
    latest_state = awaited(training.Training.latest_state)
    history = awaited(training.Training.history)
    finish = awaited(training.Training.finish)
    delete = awaited(training.Training.delete)
