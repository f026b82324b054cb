"""What a training step with an optimizer sends: the commands and messages of a step, by formula.

A test compares ``executed`` with what a real server executes, so that the simulation cannot drift from the code.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from redisacc._format import buffered
from redisacc._format.keys import MOST_PARTITIONS, most_automatic_partitions
from redisacc._protocol.parameters import ahead
from redisacc._protocol.parts.sweep import ATTEMPTS_PER_CALL

# With more partitions than this, chiefs do not listen to messages about parts, nor workers to those about updates.
MOST_CHANNELS = ahead.MOST_CHANNELS


def automatic(nodes: int, nbytes: int) -> int:
    """Returns the partitions that ``partitions="auto"`` chooses."""
    return min(nodes, most_automatic_partitions(nbytes), MOST_PARTITIONS)


@dataclass(frozen=True)
class Step:
    """A step of a training without clipping, whose reducers are in time.

    Attributes:
        workers: number of workers, all of which a step needs.
        partitions: number of partitions; 1: none.
        nbytes: bytes of the model in float32, at least 512 KiB.
        slots: arrays of state for each parameter.
    """

    workers: int
    partitions: int
    nbytes: int
    slots: int = 0

    @property
    def parts(self) -> int:
        """The number of parts of a gradient, and of the weights."""
        size = buffered.part_size(self.nbytes, self.partitions)
        whole, rest = divmod(self.nbytes, size)
        # A short rest is added to the last part.
        return max(whole + (rest > size / 8 or (rest > 0 and self.partitions > 1)), 1)

    @property
    def part_bytes(self) -> float:
        """The bytes of a part of a gradient."""
        return self.nbytes / self.parts

    @property
    def announcement(self) -> int:
        """About how many bytes the message has that announces a gradient: its header, in hexadecimal."""
        length = len(str(int(self.part_bytes)))
        packed = 2 if length < 5 else 3 if self.part_bytes < 65_536 else 5
        return 250 + 2 * packed * self.parts

    @property
    def told_bytes(self) -> int:
        """Bytes of the messages by which the leader tells the chief and reducers of gradients in a step."""
        return self.workers * (self.partitions + 1) * (self.announcement + 250)

    @property
    def connections(self) -> int:
        """How many clients the leader has: requests, messages, and those by which reducers know each other's nodes."""
        return 4 * self.workers + 3 * self.partitions + 3

    @property
    def sweeps(self) -> int:
        """How often the chief asks for gradients whose parts are to be removed."""
        return math.ceil(self.workers / ATTEMPTS_PER_CALL) + 1 if self.partitions > 1 else 0

    def executed(self) -> Counter[str]:
        """Returns what all servers together execute in a step, as far as it grows with the model or the crew.

        ``evalsha`` counts scripts, and ``publish`` messages, whether a client sends them or a script.
        """
        workers, parts = self.workers, self.parts
        in_partitions = self.partitions > 1
        return Counter(
            {
                # Gradients; and the weights and the state.
                "set": workers * parts + (1 + self.slots) * parts + (0 if in_partitions else workers),
                # By reducers, and by workers.
                "get": 2 * workers * parts + (0 if in_partitions else workers),
                # Two for each gradient. Two polls of the take, the commit; the order, and a sweep of the parameters.
                "evalsha": 2 * workers + (5 + self.sweeps if in_partitions else 4),
                # A gradient is announced, counted (to observers and to takers), and its parts are. Updaters tell of
                # their parts. The round is told of twice, the order or the version of the weights three times.
                "publish": workers * (3 + parts - (0 if in_partitions else 1)) + parts + 5,
            }
        )
