"""A model of how versions of parameters are published whose parts lie on other nodes than their record.

It is the sibling of ``partition_model``, which says what the two have in common: attempts that the leader registers
with a number and a lease, writes that are confirmed by the nodes, a commit at the leader, a sweeper, and a gc. Here, a
commit replaces a version by the next one:

1. A publisher reads which version is published, and registers an attempt to publish the one that follows it.
2. It writes the part, and has proof that it will stay.
3. *commit* (leader): if the version that it follows is still the one that is published, and the attempt still has its
   lease, the record names the new version, and the blob of the version before is *retired*: it goes into the list. Its
   lease may be over at any time, as those of publishers may. The record names what was retired last, and what was
   retired before that is to be removed at once.

A reader reads the record and then the part. If the part is missing, it reads the record again. Between any two steps,
each process may die, and requests may be delivered late and twice. One node with one part stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from state_search import Search

# An attempt: who publishes, and the number that the leader gave it. Its blob has the same name.
Attempt = tuple[int, int]
# The version that is there from the beginning.
FIRST: Attempt = (-1, 0)


@dataclass(frozen=True)
class VersionRules:
    """What the protocol insists on. A test switches each of them off and expects the search to find harm.

    Attributes:
        fence_before_removal: the sweeper removes parts only after the lease of their blob was ended at the leader.
        proof_before_commit: a publisher asks for the commit only when it knows that its part was persisted.
        persists: the expiry of a part is removed before the commit.
        numbers_are_used_once: the leader's counter only grows, so no number is given twice.
        follows: a version is published only if the one that it follows is still there.
        asks_after_listing: gc asks the leader about a blob after it has seen its part, and not before.
        names_what_is_retired: the record names the retired blob, so that gc finds it there if it was published when gc
            read the list.
    """

    fence_before_removal: bool = True
    proof_before_commit: bool = True
    persists: bool = True
    numbers_are_used_once: bool = True
    follows: bool = True
    asks_after_listing: bool = True
    names_what_is_retired: bool = True


class Publisher(NamedTuple):
    """A process that publishes one version.

    Attributes:
        tries: how often it has begun anew; -1: it is dead or has finished.
        at: what it does next, or whose reply it waits for: look, register, write.
        previous: the version that it follows.
        number: the number of its attempt; -1: it does not know it yet.
    """

    tries: int = 0
    at: str = "look"
    previous: Attempt = FIRST
    number: int = -1


class Request(NamedTuple):
    """A request on its way.

    Attributes:
        what: register, write, persist or commit.
        attempt: the attempt; for a registration, the publisher and its try.
        previous: the version that it follows.
    """

    what: str
    attempt: Attempt
    previous: Attempt


class State(NamedTuple):
    """Everything that is stored, under way, and known to a process.

    Attributes:
        publishers: the publishers.
        version: the version that the record names.
        followed: the versions that another one has followed.
        forked: whether two versions followed the same one.
        retired: the blobs that the record names as retired.
        leased: blobs in the list with a lease, which may be over at any time: of attempts, and retired ones.
        ended: blobs in the list whose parts are to be removed.
        passed: for each publisher the highest number that it was given; -1: none.
        answers: replies to registrations: publisher, its try, and the number that it got.
        parts: blobs whose part is on the node: True if it has no expiry.
        flying: requests on their way.
        reading: the version whose part the reader is about to read; None: it has read none yet, or has finished.
        reads: how often the reader may read the record yet.
        sweeping: the blob whose part the sweeper is about to remove.
        collecting: the blob that gc has found.
        asked: what gc has found of it: "", "not listed", or "condemned".
    """

    publishers: tuple[Publisher, ...]
    passed: tuple[int, ...]
    version: Attempt = FIRST
    followed: frozenset[Attempt] = frozenset()
    forked: bool = False
    retired: frozenset[Attempt] = frozenset()
    leased: frozenset[Attempt] = frozenset()
    ended: frozenset[Attempt] = frozenset()
    answers: frozenset[tuple[int, int, int]] = frozenset()
    parts: frozenset[tuple[Attempt, bool]] = frozenset({(FIRST, True)})
    flying: frozenset[Request] = frozenset()
    reading: Attempt | None = None
    reads: int = 2
    sweeping: Attempt | None = None
    collecting: Attempt | None = None
    asked: str = ""


@dataclass(frozen=True)
class VersionModel:
    """The model, with the bounds of its search.

    Attributes:
        publishers: how many processes publish a version, each one.
        tries: how often each of them begins, at most.
        numbers: how many attempts of a publisher the leader registers, at most.
        rules: the rules of the protocol.
    """

    publishers: int
    tries: int
    numbers: int = 2
    rules: VersionRules = VersionRules()

    def run(self) -> int:
        """Visits all states, and returns how many there are.

        Raises:
            Harm: one of them must not be.
        """
        return Search(self).run()

    def first(self) -> State:
        """Returns the state in which everything begins."""
        return State((Publisher(),) * self.publishers, (-1,) * self.publishers)

    # What must hold.

    def problem(self, state: State) -> str | None:
        """Returns what is wrong in a state."""
        if (state.version, True) not in state.parts:
            # So a reader that finds a part missing finds another version at the leader.
            return f"the part of the published version {state.version} is gone, or will expire"
        if state.forked:
            return "two versions were published that follow the same one"
        if state.asked == "condemned" and state.collecting in state.leased:
            return f"gc removes the part of {state.collecting}, which has its lease"
        return None

    def problem_at_rest(self, state: State) -> str | None:
        """Returns what is wrong when nothing more can happen: nobody is left, and everything was delivered."""
        if state.leased or state.ended:
            return "a blob stays in the list forever"
        if any(blob != state.version for blob, _ in state.parts):
            return "a part stays forever"
        return None

    # What can happen next.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields what can happen next."""
        for number, publisher in enumerate(state.publishers):
            if publisher.tries >= 0:
                yield from self._publisher_steps(state, number, publisher)
        for request in state.flying:
            yield from self._delivery(state, request)
        yield from self._reader_steps(state)
        yield from self._sweeper_steps(state)
        yield from self._gc_steps(state)
        for blob, persisted in state.parts:
            if not persisted and not any(request.attempt == blob for request in state.flying):
                yield f"the part of {blob} expires", state._replace(parts=state.parts - {(blob, False)})

    def _publisher_steps(self, state: State, which: int, publisher: Publisher) -> Iterator[tuple[str, State]]:
        def become(new: Publisher, *requests: str) -> State:
            sent = frozenset(
                Request(what, (which, new.tries if what == "register" else new.number), new.previous)
                for what in requests
            )
            publishers = (*state.publishers[:which], new, *state.publishers[which + 1 :])
            return state._replace(publishers=publishers, flying=state.flying | sent)

        yield f"publisher {which} dies", become(Publisher(-1, ""))
        if publisher.at != "look" and publisher.tries + 1 < self.tries:
            # Its attempt was refused, or its connection broke.
            yield f"publisher {which} begins anew", become(Publisher(publisher.tries + 1))
        if publisher.at == "look":
            following = publisher._replace(at="register", previous=state.version)
            yield f"publisher {which} sees {state.version}", become(following, "register")
        elif publisher.at == "register":
            requests = ["write", *(["persist"] if self.rules.persists else [])]
            requests += [] if self.rules.proof_before_commit else ["commit"]
            for asked, tries, number in state.answers:
                if (asked, tries) == (which, publisher.tries):
                    registered = publisher._replace(at="write", number=number)
                    yield f"publisher {which} was registered as {(which, number)}", become(registered, *requests)
        elif publisher.at == "write":
            on_their_way = {request.what for request in state.flying if request.attempt == (which, publisher.number)}
            if not on_their_way & {"write", "persist"}:
                done = Publisher(-1, "", publisher.previous, publisher.number)
                commit = Request("commit", (which, publisher.number), publisher.previous)
                sent = become(done)
                yield f"publisher {which} has proof", sent._replace(flying=sent.flying | {commit})

    def _delivery(self, state: State, request: Request) -> Iterator[tuple[str, State]]:
        without = state._replace(flying=state.flying - {request})
        what = f"{request.what} of {request.attempt} arrives"
        match request.what:
            case "write":
                # NX: a part that is there stays as it is.
                parts = state.parts
                yield (
                    what,
                    without._replace(
                        parts=parts if (request.attempt, True) in parts else parts | {(request.attempt, False)}
                    ),
                )
                rest = frozenset(
                    flying
                    for flying in state.flying
                    if flying.attempt != request.attempt or flying.what not in ("write", "persist")
                )
                if state.publishers[request.attempt[0]].number != request.attempt[1]:
                    yield f"write of {request.attempt} is lost", state._replace(flying=rest)
            case "persist":
                # It follows the write on the same connection.
                if request._replace(what="write") not in state.flying:
                    parts = state.parts
                    if (request.attempt, False) in parts:
                        parts = parts - {(request.attempt, False)} | {(request.attempt, True)}
                    yield what, without._replace(parts=parts)
            case "register":
                yield what, self._register(without, request)
                yield f"{what}, and will again", self._register(state, request)
            case "commit":
                yield what, self._commit(without, request)
                yield f"{what}, and will again", self._commit(state, request)

    def _register(self, state: State, request: Request) -> State:
        which, tries = request.attempt
        if state.version != request.previous:
            return state
        if self.rules.numbers_are_used_once:
            number = state.passed[which] + 1
        else:
            known = state.leased | state.ended | {state.version}
            number = next(free for free in count() if (which, free) not in known)
        if number >= self.numbers:
            # A bound for the search: this copy is lost.
            return state
        passed = (*state.passed[:which], max(number, state.passed[which]), *state.passed[which + 1 :])
        return state._replace(
            leased=state.leased | {(which, number)}, passed=passed, answers=state.answers | {(which, tries, number)}
        )

    def _commit(self, state: State, request: Request) -> State:
        new, before = request.attempt, state.version
        if before == new or (self.rules.follows and before != request.previous) or new not in state.leased:
            return state
        removed = state.retired & state.leased
        return state._replace(
            version=new,
            followed=state.followed | {request.previous},
            forked=request.previous in state.followed,
            retired=frozenset({before} if self.rules.names_what_is_retired else ()),
            leased=state.leased - removed - {new} | {before},
            ended=state.ended | removed,
        )

    def _reader_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.reading is None:
            if state.reads:
                yield f"the reader sees {state.version}", state._replace(reading=state.version, reads=state.reads - 1)
            return
        there = any(blob == state.reading for blob, _ in state.parts)
        if there or state.version != state.reading:
            # It has the values, or reads the record again.
            yield "the reader has read", state._replace(reading=None)
        # Otherwise it would report a loss; `problem` has found the same.

    def _sweeper_steps(self, state: State) -> Iterator[tuple[str, State]]:
        blob = state.sweeping
        if blob is not None:
            yield "the sweeper dies", state._replace(sweeping=None)
            yield (
                f"the sweeper removes the part of {blob} and forgets it",
                state._replace(
                    sweeping=None,
                    parts=frozenset(part for part in state.parts if part[0] != blob),
                    leased=state.leased - {blob},
                    ended=state.ended - {blob},
                ),
            )
            return
        for due in state.leased:
            if self.rules.fence_before_removal:
                ended = state._replace(leased=state.leased - {due}, ended=state.ended | {due})
                yield f"the sweeper ends the lease of {due}", ended._replace(sweeping=due)
            else:
                yield f"the sweeper finds {due}", state._replace(sweeping=due)
        for due in state.ended:
            yield f"the sweeper finds {due}", state._replace(sweeping=due)

    def _gc_steps(self, state: State) -> Iterator[tuple[str, State]]:
        blob = state.collecting
        if blob is None:
            seen = {found for found, _ in state.parts}
            if not self.rules.asks_after_listing:
                every = {(who, number) for who in range(self.publishers) for number in range(self.numbers)}
                for unseen in every - state.leased - state.ended - state.retired - {state.version}:
                    yield f"the leader does not know {unseen}", state._replace(collecting=unseen, asked="condemned")
                return
            for found in seen:
                yield f"gc finds the part of {found}", state._replace(collecting=found)
            return
        yield "gc dies", state._replace(collecting=None, asked="")
        if state.asked == "condemned":
            parts = frozenset(part for part in state.parts if part[0] != blob)
            yield f"gc removes the part of {blob}", state._replace(parts=parts, collecting=None, asked="")
        elif state.asked == "not listed":
            if blob not in {state.version, *state.retired}:
                yield f"the record does not name {blob}", state._replace(asked="condemned")
        elif blob not in state.leased | state.ended:
            yield f"the leader does not list {blob}", state._replace(asked="not listed")
