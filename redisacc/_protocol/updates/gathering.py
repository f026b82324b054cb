"""Gathers a version that a server has lost in part or whole: from this process, from the nodes, and from reducers.

A reducer has the parts that it updates in memory. If it hears that a version is wanted, it writes those again, under
their names, with an expiry (``PartUpdater``). They are read from the nodes then, like those that were never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redisacc._arrays.validation import Array
from redisacc._clock import clock, durations
from redisacc._format.update_order import wanted
from redisacc._protocol.updates.model import UpdateModel
from redisacc._protocol.updates.record import UpdateRecord
from redisacc._protocol.updates.values import VersionValues
from redisacc._protocol.waiting.wait import until
from redisacc._text import listed, shown
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import DataLossError

# How often reducers are asked, in seconds.
ASK_EVERY = 0.5
# How often the nodes are asked what is there, in seconds.
PAUSE = 0.05
# How many numbers of lost parts a message names.
MOST_NAMED = 10


@dataclass(frozen=True)
class KnownVersion:
    """A version that an optimizer has made, as a chief knows it without the server.

    Attributes:
        id: its id.
        step: its step.
        updates: how many updates its state has seen.
        model: the leaves and the optimizer.
    """

    id: str
    step: int
    updates: int
    model: UpdateModel

    @classmethod
    def of(cls, record: UpdateRecord) -> KnownVersion:
        """Returns the version that a record names."""
        return cls(record.record.version, record.record.step, record.updates, record.model)

    def following(self, version: str, updates: int) -> KnownVersion:
        """Returns the version that an update has made of this one."""
        return KnownVersion(version, self.step + 1, updates, self.model)


def gather(
    transport: Transport, values: VersionValues, of: KnownVersion, check: Callable[[], object]
) -> dict[str, dict[int, Array]]:
    """Returns the dense leaves of a version for each sort of blob. Blocks until all parts of it are there.

    Args:
        transport: the way to the nodes.
        values: the parts that this process has.
        of: the version.
        check: raises an error if this process is no longer the chief.

    Raises:
        DataLossError: some parts are on no node, and no process has written them again in time.
    """
    model, asked_at = of.model, 0.0

    def probe() -> dict[str, dict[int, Array]] | None:
        values.fetch_there(model)
        return values.whole(model)

    def check_and_ask() -> None:
        nonlocal asked_at
        check()
        if clock.now() >= asked_at + ASK_EVERY:
            asked_at = clock.now()
            transport.pipeline([Hint(("PUBLISH", model.keys.events, wanted(of.id)))])

    values.begin(of.id)
    leaves = until(
        transport.waits,
        probe,
        every=PAUSE,
        check=check_and_ask,
        describe=lambda: (
            f"{model.keys.name}: still waiting for reducers to write {len(values.missing(model))} lost parts of step "
            f"{of.step} again"
        ),
        deadline=clock.now() + durations.gathering,
        name=model.keys.name,
    )
    if leaves is None:
        raise _lost(of, values.missing(model))
    return leaves


def _lost(of: KnownVersion, numbers: Sequence[int]) -> DataLossError:
    keys = of.model.keys
    part = keys.part(f"{of.id}-{of.model.base}", numbers[0])
    named = listed(numbers, MOST_NAMED)
    return DataLossError(
        f"parameters {shown(keys.name)}: the server has lost step {of.step}, and no living process has part {named} of "
        f"{len(of.model.parts)} of its weights and state, such as {part}. A chief can continue from a "
        "checkpoint, or with the weights of a living worker and a new state",
        part=part,
    )
