"""A model of how a gradient is committed whose parts lie on several nodes, and a search through all of its states.

The design: the record of an accumulator lies in the leader slot, and the parts of its gradients lie in other slots, on
other nodes. No script can touch both, so the commit is the work of several requests:

1. *register* (leader): an *attempt* to store a gradient gets an intent with a lease, and a number from the leader's
   counter, which no other attempt gets. So a late copy of this request makes another attempt, which nobody uses.
2. *write* (node): the part is written, under a name that contains the attempt, with an expiry.
3. *persist* (node): its expiry is removed. Replies to 2 and 3 are the writer's proof that the part will stay.
4. *admit* (leader): the gradient counts if the intent is still registered. Otherwise, the reply is "fenced".

A sweeper fences intents whose lease is over, then removes their parts, and forgets the intents. Parts that arrive after
that belong to an attempt that the leader does not know, and never will again; `gc` lists the parts of a node, asks the
leader about their attempts, and then removes those that it does not know. A taker takes the round at the leader, reads
the parts, acknowledges at the leader, which moves the attempts to the *trash*, and removes their parts. Any process
that finds trash may empty it.

The model has writers, one taker, one that recovers its round, one sweeper, and one gc. Between any two steps, each may
die; a request may be delivered late, even after its sender has died or has begun a new attempt; a request to the leader
may be delivered twice. Leases are not clocked: they may be over at any time. One node with one part per gradient stands
for all nodes, because parts of different nodes have nothing to do with each other before step 4, and that step needs
the proof of all of them.

If the leader fails over, its replica takes its place, with what it has received of the leader's state. That may happen
once, at any moment. What the leader alone knew is lost then, which its callers are told. But parts of what the replica
knows must still be there, so parts are removed only after the replica has confirmed that their attempt is over
(``min_replicas``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from state_search import Search

# An attempt: the number of the gradient, and that of the attempt.
Attempt = tuple[int, int]
Attempts = frozenset[Attempt]
NONE: Attempts = frozenset()


@dataclass(frozen=True)
class Rules:
    """What the protocol insists on. A test switches each of them off and expects the search to find harm.

    Attributes:
        fence_before_removal: the sweeper removes parts only after it has fenced the intent.
        proof_before_admission: a writer asks for admission only when it knows that its part was persisted.
        persists: the expiry of a part is removed before the gradient is admitted.
        attempts_are_used_once: the leader's counter only grows, so no number is given twice.
        one_outcome: the leader admits a gradient only once, whichever attempt it comes from.
        asks_after_listing: gc asks the leader about an attempt after it has seen its part, and not before.
        result_after_acknowledgement: a taker hands out its result only when its acknowledgement was accepted.
        confirmation_before_removal: the sweeper removes parts only after the replica has confirmed the fence.
        names_outlive_failovers: the name of an attempt contains something random, so that it is not used again by a
            leader whose counter is that of a replica that lagged behind.
        renewal_needs_lease: a renewal gives no lease to an attempt that was given up.
    """

    fence_before_removal: bool = True
    proof_before_admission: bool = True
    persists: bool = True
    attempts_are_used_once: bool = True
    one_outcome: bool = True
    asks_after_listing: bool = True
    result_after_acknowledgement: bool = True
    confirmation_before_removal: bool = True
    names_outlive_failovers: bool = True
    renewal_needs_lease: bool = True


class Writer(NamedTuple):
    """A process that stores one gradient.

    Attributes:
        tries: how often it has begun anew; -1: it is dead or has finished.
        at: the request whose reply it waits for: register, write, admit, or remove after a refusal.
        attempt: the number that the leader gave its attempt; -1: it does not know it yet.
    """

    tries: int = 0
    at: str = "register"
    attempt: int = -1


class Taker(NamedTuple):
    """A process that takes a round.

    Attributes:
        at: take, read, acknowledge, remove, or "" if it is dead or has finished.
        read: the attempts that are in its sum.
    """

    at: str
    read: Attempts = NONE


class Replica(NamedTuple):
    """What the leader's replica has received: fields of the state of the same names."""

    registered: Attempts
    fenced: Attempts
    passed: tuple[int, ...]
    admitted: Attempts
    round: Attempts
    taken: Attempts
    owner: int
    trash: Attempts


class State(NamedTuple):
    """Everything that is stored, under way, and known to a process.

    Attributes:
        writers: one for each gradient.
        takers: the first one, and the one that may recover its round.
        sweeping: the attempt whose intent the sweeper has fenced, and whose part it is about to remove.
        confirmed: whether the replica has confirmed that this attempt is over.
        collecting: the attempt that gc is about to ask about, or whose part it is about to remove.
        condemned: whether the leader did not know that attempt.
        registered, fenced: intents at the leader.
        passed: for each gradient the highest number of an attempt that was registered; -1: none.
        answers: replies to registrations: gradient, try of the writer, and the number that it got.
        admitted: for each gradient the attempts that were counted.
        round: the attempts in the current round.
        taken: the attempts in the round that was taken.
        owner: the taker that the taken round belongs to; -1: nothing was taken.
        trash: attempts that were acknowledged and whose parts may still be there.
        parts: attempts whose part is on the node: True if it has no expiry.
        flying: requests on their way: (request, attempt or taker).
        results: the attempts that were handed out, each as often as it was.
        replica: what the leader's replica knows; None: there is none, or it has taken over.
        failed_over: whether it has.
    """

    writers: tuple[Writer, ...]
    takers: tuple[Taker, ...]
    sweeping: Attempt | None = None
    confirmed: bool = False
    collecting: Attempt | None = None
    condemned: bool = False
    registered: Attempts = NONE
    fenced: Attempts = NONE
    passed: tuple[int, ...] = ()
    answers: frozenset[tuple[int, int, int]] = frozenset()
    admitted: Attempts = NONE
    round: Attempts = NONE
    taken: Attempts = NONE
    owner: int = -1
    trash: Attempts = NONE
    parts: frozenset[tuple[Attempt, bool]] = frozenset()
    flying: frozenset[tuple[str, Attempt]] = frozenset()
    results: tuple[Attempt, ...] = ()
    replica: Replica | None = None
    failed_over: bool = False

    def replicated(self) -> Replica:
        """Returns what a replica knows that has received everything."""
        return Replica(**{name: getattr(self, name) for name in Replica._fields})

    def mirrored(self) -> State:
        """Returns the same state with two gradients, and their writers, in each other's place."""

        def of(attempts: Attempts) -> Attempts:
            return frozenset((1 - gradient, which) for gradient, which in attempts)

        def one(attempt: Attempt | None) -> Attempt | None:
            return None if attempt is None else (1 - attempt[0], attempt[1])

        return self._replace(
            writers=self.writers[::-1],
            takers=tuple(Taker(taker.at, of(taker.read)) for taker in self.takers),
            sweeping=one(self.sweeping),
            collecting=one(self.collecting),
            registered=of(self.registered),
            fenced=of(self.fenced),
            passed=self.passed[::-1],
            answers=frozenset((1 - gradient, tries, which) for gradient, tries, which in self.answers),
            admitted=of(self.admitted),
            round=of(self.round),
            taken=of(self.taken),
            trash=of(self.trash),
            parts=frozenset(((1 - gradient, which), lasts) for (gradient, which), lasts in self.parts),
            flying=frozenset((request, (1 - gradient, which)) for request, (gradient, which) in self.flying),
            results=tuple((1 - gradient, which) for gradient, which in self.results),
        )


@dataclass(frozen=True)
class PartitionModel:
    """The model, with the bounds of its search.

    Attributes:
        gradients: how many gradients are stored, each by a writer of its own.
        attempts: how often a writer tries, at most.
        numbers: how many attempts of a gradient the leader registers, at most. With more than the writer tries, some of
            them come from copies of its requests.
        rules: the rules of the protocol.
        fails_over: whether the leader has a replica, which may take over.
    """

    gradients: int
    attempts: int
    numbers: int = 2
    rules: Rules = Rules()
    fails_over: bool = False

    def run(self) -> int:
        """Visits all states, and returns how many there are.

        Raises:
            Harm: one of them must not be.
        """
        # The protocol treats all gradients alike, so two of them are symmetric.
        return Search(self, mirror=self if self.gradients == 2 else None).run()

    def first(self) -> State:
        """Returns the state in which everything begins."""
        first = State(
            writers=(Writer(),) * self.gradients,
            takers=(Taker("take"), Taker("recover")),
            passed=(-1,) * self.gradients,
            flying=frozenset(("register", (number, 0)) for number in range(self.gradients)),
        )
        if not self.fails_over:
            return first
        assert self.gradients == 1, "the replica is not mirrored"
        return first._replace(replica=first.replicated())

    @staticmethod
    def mirrored(state: State) -> State:
        """Returns the same state with two gradients, and their writers, in each other's place."""
        return state.mirrored()

    # What must hold.

    def problem(self, state: State) -> str | None:
        """Returns what is wrong in a state."""
        lasting = {attempt for attempt, persisted in state.parts if persisted}
        for attempt in state.round | state.taken:
            if attempt not in lasting:
                return f"the part of the counted gradient {attempt} is gone, or will expire"
        gradients = [gradient for gradient, _ in state.admitted]
        if len(gradients) > len(set(gradients)):
            return "a gradient was counted twice"
        # A round whose acknowledgement a failover has undone is handed out again, which nothing can prevent.
        if len(state.results) > len(set(state.results)) and not state.failed_over:
            return "a gradient was handed out twice"
        return None

    def problem_at_rest(self, state: State) -> str | None:
        """Returns what is wrong when nothing more can happen: nobody is left, and everything was delivered."""
        if state.registered or state.fenced or state.trash:
            return "an intent or trash stays forever"
        if any(persisted and attempt not in state.round | state.taken for attempt, persisted in state.parts):
            return "a part stays forever"
        return None

    def _knows(self, state: State, attempt: Attempt) -> bool:
        """Whether the leader knows the attempt."""
        return attempt in state.registered | state.fenced | state.round | state.taken | state.trash

    # What can happen next.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields what can happen next."""
        for number, writer in enumerate(state.writers):
            if writer.tries >= 0:
                yield from self._writer_steps(state, number, writer)
        for number, taker in enumerate(state.takers):
            if taker.at:
                yield from self._taker_steps(state, number, taker)
        yield from self._sweeper_steps(state)
        yield from self._gc_steps(state)
        yield from self._replica_steps(state)
        if not self.rules.renewal_needs_lease:
            # Otherwise, a renewal changes nothing here, because leases may end at any time.
            for attempt in state.fenced:
                renewed = state._replace(fenced=state.fenced - {attempt}, registered=state.registered | {attempt})
                yield f"a renewal of {attempt} arrives", renewed
        for request, attempt in state.flying:
            yield from self._delivery(state, request, attempt)
        for attempt, persisted in state.parts:
            if not persisted and not any(a == attempt for _, a in state.flying):
                # The expiry is longer than a request can be on its way; with `persists` off, at any time.
                yield f"the part of {attempt} expires", state._replace(parts=state.parts - {(attempt, False)})

    def _writer_steps(self, state: State, number: int, writer: Writer) -> Iterator[tuple[str, State]]:
        def become(new: Writer, *requests: str) -> State:
            writers = (*state.writers[:number], new, *state.writers[number + 1 :])
            sent = frozenset(
                (request, (number, new.tries if request == "register" else new.attempt)) for request in requests
            )
            return state._replace(writers=writers, flying=state.flying | sent)

        attempt = (number, writer.attempt)
        yield f"writer {number} dies", become(Writer(-1, ""))
        if writer.tries + 1 < self.attempts:
            # Its connection broke, and it does not know what became of its requests.
            yield f"writer {number} begins anew", become(Writer(writer.tries + 1), "register")
        if writer.at == "register":
            follow = ("write", "persist") if self.rules.persists else ("write",)
            if not self.rules.proof_before_admission:
                follow = (*follow, "admit")
            for gradient, tries, which in state.answers:
                if (gradient, tries) == (number, writer.tries):
                    registered = writer._replace(at="write", attempt=which)
                    yield f"writer {number} was registered as {(number, which)}", become(registered, *follow)
        elif writer.at == "write" and self._proved(state, attempt):
            yield f"writer {number} has proof for {attempt}", become(writer._replace(at="admit"), "admit")
        elif writer.at == "remove":
            parts = frozenset(part for part in state.parts if part[0] != attempt)
            removed = become(Writer(-1, ""))._replace(parts=parts)
            yield f"writer {number} removes the part of {attempt}, which was refused", removed

    def _proved(self, state: State, attempt: Attempt) -> bool:
        """Whether the writer can have replies to all its requests to the node."""
        return not any(flying in state.flying for flying in (("write", attempt), ("persist", attempt)))

    def _delivery(self, state: State, request: str, attempt: Attempt) -> Iterator[tuple[str, State]]:
        without = state._replace(flying=state.flying - {(request, attempt)})
        what = f"{request} of {attempt} arrives"
        if request == "write":
            yield what, without._replace(parts=state.parts | {(attempt, False)})
            # The connection broke before it was sent: nothing that follows arrives either.
            rest = frozenset(flying for flying in state.flying if flying[1] != attempt or flying[0] == "register")
            if state.writers[attempt[0]].attempt != attempt[1]:
                yield f"{request} of {attempt} is lost", state._replace(flying=rest)
            return
        if request == "register":
            yield f"{what}", self._register(without, attempt)
            yield f"{what}, and will again", self._register(state, attempt)
            return
        if request == "persist":
            # It follows the write on the same connection.
            if ("write", attempt) not in state.flying:
                parts = state.parts
                if (attempt, False) in parts:
                    parts = parts - {(attempt, False)} | {(attempt, True)}
                yield what, without._replace(parts=parts)
            return
        yield what, self._admit(without, attempt)
        yield f"{what}, and will again", self._admit(state, attempt)

    def _register(self, state: State, sent: tuple[int, int]) -> State:
        """Registers an attempt for a request, which is the gradient and the try of its writer."""
        number, tries = sent
        if self.rules.one_outcome and any(gradient == number for gradient, _ in state.admitted):
            # The reply is the outcome.
            return state
        if self.rules.attempts_are_used_once:
            place = state.passed[number] + 1
        else:
            place = next(free for free in count() if not self._knows(state, (number, self._named(free, tries))))
        if place >= self.numbers:
            # A bound for the search: this copy is lost.
            return state
        which = self._named(place, tries)
        passed = (*state.passed[:number], max(place, state.passed[number]), *state.passed[number + 1 :])
        return state._replace(
            registered=state.registered | {(number, which)},
            passed=passed,
            answers=state.answers | {(number, tries, which)},
        )

    def _named(self, place: int, tries: int) -> int:
        """Returns the number that stands for the name of an attempt: its place, and what its writer made up."""
        return place + self.numbers * tries if self.rules.names_outlive_failovers else place

    def _admit(self, state: State, attempt: Attempt) -> State:
        if attempt not in state.registered:
            number, which = attempt
            writer = state.writers[number]
            if (writer.at, writer.attempt) != ("admit", which) or attempt in state.admitted:
                return state
            # Its writer learns that somebody has given it up, and removes what was written after that.
            writers = (*state.writers[:number], writer._replace(at="remove"), *state.writers[number + 1 :])
            return state._replace(writers=writers)
        if self.rules.one_outcome and any(gradient == attempt[0] for gradient, _ in state.admitted):
            return state._replace(registered=state.registered - {attempt}, fenced=state.fenced | {attempt})
        return state._replace(
            registered=state.registered - {attempt},
            admitted=state.admitted | {attempt},
            round=state.round | {attempt},
        )

    def _replica_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.replica is None:
            return
        if state.replica != (known := state.replicated()):
            yield "the replica receives everything", state._replace(replica=known)
        # What is on its way to the old leader or from there is lost. Who waits for a reply asks the new leader.
        asked_again = {
            (writer.at, (number, writer.tries if writer.at == "register" else writer.attempt))
            for number, writer in enumerate(state.writers)
            if writer.at in ("register", "admit")
        }
        to_nodes = {(request, attempt) for request, attempt in state.flying if request in ("write", "persist")}
        fields = {**state.replica._asdict(), "flying": frozenset(to_nodes | asked_again), "answers": NONE}
        if not state.confirmed:
            # The sweeper's request, too, begins anew there.
            fields["sweeping"] = None
        yield "the replica takes over", state._replace(**fields, replica=None, failed_over=True)

    def _sweeper_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.sweeping is not None:
            attempt = state.sweeping
            yield "the sweeper dies", state._replace(sweeping=None, confirmed=False)
            if self.rules.confirmation_before_removal and not state.confirmed:
                received = None if state.replica is None else state.replicated()
                yield "the replica confirms that", state._replace(confirmed=True, replica=received)
                return
            parts = frozenset(part for part in state.parts if part[0] != attempt)
            removed = state._replace(
                sweeping=None,
                confirmed=False,
                parts=parts,
                registered=state.registered - {attempt},
                fenced=state.fenced - {attempt},
                trash=state.trash - {attempt},
            )
            yield f"the sweeper removes the part of {attempt} and forgets it", removed
            return
        for attempt in state.registered:
            # Its lease is over, or so the clock says.
            if self.rules.fence_before_removal:
                fenced = state._replace(registered=state.registered - {attempt}, fenced=state.fenced | {attempt})
                yield f"the sweeper fences {attempt}", fenced._replace(sweeping=attempt)
            else:
                yield f"the sweeper finds {attempt}", state._replace(sweeping=attempt)
        for attempt in state.fenced | state.trash:
            yield f"the sweeper finds {attempt}", state._replace(sweeping=attempt)

    def _gc_steps(self, state: State) -> Iterator[tuple[str, State]]:
        attempt = state.collecting
        if attempt is None:
            if self.rules.asks_after_listing:
                for found, _ in state.parts:
                    yield f"gc finds the part of {found}", state._replace(collecting=found)
                return
            for number in range(self.gradients):
                for which in range(self.numbers * self.attempts):
                    if not self._knows(state, (number, which)):
                        unknown = state._replace(collecting=(number, which), condemned=True)
                        yield f"the leader does not know {(number, which)}", unknown
            return
        yield "gc dies", state._replace(collecting=None, condemned=False)
        if state.condemned:
            parts = frozenset(part for part in state.parts if part[0] != attempt)
            yield f"gc removes the part of {attempt}", state._replace(parts=parts, collecting=None, condemned=False)
        elif not self._knows(state, attempt):
            yield f"the leader does not know {attempt}", state._replace(condemned=True)

    def _taker_steps(self, state: State, number: int, taker: Taker) -> Iterator[tuple[str, State]]:
        def become(new: Taker, at: State = state) -> State:
            return at._replace(takers=(*at.takers[:number], new, *at.takers[number + 1 :]))

        yield f"taker {number} dies", become(Taker(""))
        if taker.at == "take" and state.round and state.owner < 0:
            granted = state._replace(taken=state.round, round=NONE, owner=number)
            yield f"taker {number} takes {set(state.round)}", become(Taker("read"), granted)
        elif taker.at == "recover" and state.owner == 0:
            yield f"taker {number} recovers", become(Taker("read"), state._replace(owner=number))
        elif taker.at == "read" and state.owner == number:
            there = frozenset(attempt for attempt, _ in state.parts)
            # A part that is missing while the round is still ours is reported as lost data, and checked elsewhere.
            if state.taken <= there:
                yield f"taker {number} has read", become(Taker("acknowledge", state.taken), self._handed(state))
        elif taker.at == "acknowledge":
            if state.owner == number:
                done = state._replace(owner=2, taken=NONE, trash=state.trash | taker.read)
                handed = done._replace(results=(*done.results, *sorted(taker.read)))
                accepted = handed if self.rules.result_after_acknowledgement else done
                # With a replica, it is left to the sweeper, who waits for that one.
                then = Taker("") if self.fails_over else taker._replace(at="remove")
                yield f"taker {number} acknowledges", become(then, accepted)
            # Otherwise its round was recovered: it gets an error.
        elif taker.at == "remove":
            parts = frozenset(part for part in state.parts if part[0] not in taker.read)
            yield f"taker {number} removes the parts", become(Taker(""), state._replace(parts=parts))

    def _handed(self, state: State) -> State:
        """Hands out the taken round before it is acknowledged, if the rules allow that."""
        if self.rules.result_after_acknowledgement:
            return state
        return state._replace(results=(*state.results, *sorted(state.taken)))
