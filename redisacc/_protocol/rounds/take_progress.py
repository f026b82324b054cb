"""Describes a waiting take for log records and errors: what has arrived, and who is missing."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._format.worker_states import WorkersByState
from redisacc._protocol.rounds.take_requirement import TakeRequirement
from redisacc._protocol.rounds.who_contributed import Contributors, states_text
from redisacc._protocol.scripts import Reply
from redisacc.errors import TakeTimeoutError

# Maximum number of workers of each state in an error's attribute.
LISTED = 100


@dataclass(frozen=True)
class TakeProgress:
    """How far a take has come.

    Attributes:
        label: the accumulator's name in log records and errors.
        required: how many gradients the take waits for. None: the quorum of the accumulator.
        num_required: the least number of them when the server answered last; 0 if only the server knows.
        min_weight: the least sum of their weights; 0: any sum will do.
        seen: the server's last reply; None: none yet.
        found: the contributors; None: they could not be read.
    """

    label: str
    required: TakeRequirement | None
    num_required: int
    min_weight: float
    seen: Reply | None
    found: Contributors | None = None

    @property
    def fields(self) -> dict[str, object]:
        """Fields of log records, for handlers that format them."""
        fields: dict[str, object] = {"num_required": self.num_required}
        if self.seen is not None:
            fields |= {"global_step": self.seen.global_step, "num_accumulated": self.seen.num_accumulated}
        return fields

    def text(self, what: str) -> str:
        """Returns a message: ``what`` the take does, such as "is still waiting", and what has arrived so far."""
        seen, found = self.seen, self.found
        required: object = self.required or "as many gradients as the quorum says"
        if self.required is None and seen is not None:
            required = TakeRequirement(seen.num_required, seen.most, seen.grace_ms)
        weight = f" with a weight of {self.min_weight:g}" if self.min_weight else ""
        text = f"{self.label}: a take of {required}{weight} {what}"
        if seen is None:
            return f"{text}: the server did not report how many gradients there are"
        weight = f", with a weight of {seen.total_weight:g} of {self.min_weight:g}," if self.min_weight else ""
        text += f": {seen.num_accumulated} of {self.num_required} gradients{weight} had arrived at step "
        text += str(seen.global_step)
        if seen.grace_left_ms:
            text += f", and {seen.grace_left_ms / 1000:.1f} s of the grace were left"
        if found is not None:
            text = "; ".join([text, *states_text(found)])
        if found is not None and found.none_to_come and seen.total_weight < self.min_weight:
            text += (
                "; every worker has contributed, and a round accepts one gradient of each, so the weight cannot be "
                "reached unless more workers join"
            )
        if found is not None and not found.ever_applied:
            text += "; nobody has ever applied a gradient to this accumulator, so check its name"
        if seen.ahead:
            text += f"; takers before it in the queue: {seen.ahead}"
        return text

    def timeout_error(self, text: str) -> TakeTimeoutError:
        """Returns the error of a take that has timed out, with this text."""
        seen, found = self.seen, self.found
        states = found.states if found else WorkersByState()
        return TakeTimeoutError(
            text,
            num_required=self.num_required,
            num_accumulated=seen.num_accumulated if seen else 0,
            workers=found.workers if found else {},
            expected=[worker.name for worker in states.expected[:LISTED]],
            late=[worker.name for worker in states.late[:LISTED]],
            gone=[worker.name for worker in states.gone[:LISTED]],
            num_expected=len(states.expected),
            num_late=len(states.late),
            num_gone=len(states.gone),
            min_weight=self.min_weight,
            total_weight=seen.total_weight if seen else 0.0,
        )
