"""Journals: what each process was about to do and was told, and whether all of it fits together.

A line is written in one system call, so that a kill loses none that a process has written. The lines:

| line | meaning |
| --- | --- |
| `begin FIRST LAST` | the gradients with these indices may be sent from now on |
| `applied INDEX STEP` | the gradient was counted in the round of this step |
| `dropped INDEX` | the gradient was stale or refused: it is in no round |
| `unconfirmed` | a gradient was counted, but replicas did not confirm it, so it may be lost |
| `loss` | the server has lost something that it had acknowledged to this process, and said so |
| `part` | that was a part of a gradient that had been counted |
| `taking` | `take_grad` is called, whose round nobody else can see |
| `lost STEP COUNT` | the round of this step, which follows, lacks so many gradients, because parts of them are lost |
| `round STEP COUNT INDEX…` | a round was delivered; the step is `?` if `take_grad` delivered it |
| `kept` | the call that was announced by `taking` has ended, and the journal has its round if there was one |
| `configured` | the quorum was changed |
| `robbed` | another taker has recovered the round that this one had |
| `wrong TEXT` | the process has seen something that must not happen |
| `end` | the process has finished by itself |
"""

import os
from collections import Counter
from dataclasses import dataclass, field


class Journal:
    """The journal of one process, which its threads and the processes that it forks share."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, line):
        os.write(self._file, line.encode() + b"\n")

    def note_round(self, step, count, indices):
        self.note(" ".join(["round", "?" if step is None else str(step), str(count), *map(str, indices)]))


@dataclass(frozen=True)
class DeliveredRound:
    """A round as a journal describes it.

    Attributes:
        count: how many gradients it has.
        indices: which ones.
        lost: how many more the server had counted in it, of which parts are lost.
    """

    count: int
    indices: frozenset[int]
    lost: int = 0


@dataclass
class Tale:
    """The contents of all journals.

    Attributes:
        acknowledgements_may_be_lost: whether replicas take over, so that a round may be delivered although somebody has
            acknowledged it.
    """

    acknowledgements_may_be_lost: bool = False
    begun: list[range] = field(default_factory=list)
    # index -> step of the round that the reply named
    applied: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    rounds: dict[int, DeliveredRound] = field(default_factory=dict)
    # Rounds that take_grad delivered, which does not say their step.
    unnumbered: list[DeliveredRound] = field(default_factory=list)
    handed_out_again: int = 0
    robbed: int = 0
    configured: int = 0
    unconfirmed: int = 0
    losses: int = 0
    lost_parts: int = 0
    # Calls of take_grad that a kill cut off. Each may have taken its round with it.
    cut_off: int = 0
    problems: list[str] = field(default_factory=list)

    def read(self, journal):
        """Adds a journal."""
        taking = lost = 0
        for line in journal.read_text().splitlines():
            what, *words = line.split(" ")
            match what:
                case "begin":
                    self.begun.append(range(int(words[0]), int(words[1]) + 1))
                case "applied":
                    self.applied[int(words[0])] = int(words[1])
                case "dropped":
                    self.dropped.add(int(words[0]))
                case "configured":
                    self.configured += 1
                case "unconfirmed":
                    self.unconfirmed += 1
                case "loss":
                    self.losses += 1
                case "part":
                    self.lost_parts += 1
                case "robbed":
                    self.robbed += 1
                case "taking":
                    taking += 1
                case "kept":
                    taking -= 1
                case "lost":
                    lost = int(words[1])
                case "round":
                    step = None if words[0] == "?" else int(words[0])
                    self.add_round(step, int(words[1]), map(int, words[2:]), lost)
                    lost = 0
                case "wrong":
                    self.problems.append(f"{journal.stem}: {line}")
        self.cut_off += taking

    def add_round(self, step, count, indices, lost=0):
        """Adds a round that was delivered, without so many gradients that are lost."""
        delivered = DeliveredRound(count, frozenset(indices), lost)
        if len(delivered.indices) != count:
            self.problems.append(f"round {step} of {count} holds {len(delivered.indices)} gradients")
        if step is None:
            self.unnumbered.append(delivered)
            return
        if step in self.rounds:
            # Its taker died before it was acknowledged.
            self.handed_out_again += 1
            less, more = sorted((delivered, self.rounds[step]), key=lambda one: one.count)
            # In the meantime, a failover may have lost parts of it.
            if not (less.indices <= more.indices and less.count + less.lost == more.count + more.lost):
                self.problems.append(f"round {step} was another when it was handed out again")
            delivered = less
        self.rounds[step] = delivered

    def check(self, info):
        """Compares the replies to workers with the rounds of takers, and both with the server's totals."""
        self._number_rounds()
        where = {}
        for step, delivered in self.rounds.items():
            for index in delivered.indices:
                if index in where:
                    self.problems.append(f"gradient {index} is in the rounds {where[index]} and {step}")
                where[index] = step
        self._check_begun(where)
        self.problems += [f"gradient {index} is in a round, but was dropped" for index in where.keys() & self.dropped]
        missing = set(range(info.global_step)) - self.rounds.keys()
        if len(missing) > self.cut_off or self.rounds.keys() - set(range(info.global_step)):
            self.problems.append(
                f"of {info.global_step} rounds, these were never delivered: {sorted(missing)[:10]}, although only "
                f"{self.cut_off} calls of take_grad were killed"
            )
        gone = 0
        for index, step in self.applied.items():
            if index in where:
                if where[index] != step:
                    self.problems.append(f"gradient {index} is in round {where[index]}, not {step}")
            elif step in missing:
                gone += 1
            else:
                self.problems.append(f"gradient {index}, which was counted at step {step}, is lost")
        # A worker that was killed leaves gradients of which no journal says whether they were counted.
        unknown = sum(map(len, self.begun)) - len(self.applied) - len(self.dropped)
        least = len(where) + gone + sum(delivered.lost for delivered in self.rounds.values())
        most = least + (unknown if missing else 0)
        if not least <= info.applied <= most:
            self.problems.append(f"the server counts {info.applied} gradients, and {least} to {most} were delivered")
        if info.takes != info.global_step:
            self.problems.append(f"the server counts {info.takes} rounds at step {info.global_step}")

    def _number_rounds(self):
        """Finds the steps of the rounds of take_grad, by what the workers were told about the gradients in them."""
        nameless = []
        for delivered in self.unnumbered:
            steps = Counter(self.applied[index] for index in delivered.indices if index in self.applied)
            if not steps:
                nameless.append(delivered)
                continue
            step = steps.most_common(1)[0][0]
            if self.acknowledgements_may_be_lost and self.rounds.get(step) == delivered:
                self.handed_out_again += 1
            elif step in self.rounds:
                self.problems.append(f"round {step} was delivered to take_grad and to somebody else")
            self.rounds[step] = delivered
        # Nobody was told anything about these: every worker in them was killed. Any step will do that is left, and of
        # which nobody was told that it counted a gradient.
        number, told = 0, set(self.applied.values())
        for delivered in nameless:
            while number in self.rounds or number in told:
                number += 1
            self.rounds[number] = delivered

    def _check_begun(self, where):
        begun = sorted(self.begun, key=lambda indices: indices.start)
        ordered, here = sorted(where), 0
        for index in ordered:
            while here < len(begun) and begun[here].stop <= index:
                here += 1
            if here == len(begun) or index not in begun[here]:
                self.problems.append(f"gradient {index} is in a round, but was never sent")
