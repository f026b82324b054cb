"""A model of attempts and pointers, and a search through all of its states.

An *attempt* is a set of parts under their final names. A *pointer* makes it real: a gradient that counts in a round, or
the version that a record names. One model describes both, with parts in the slot of the pointer and on other nodes.

With *one slot*, the name is that of the request, or random. The parts are written with an expiry, unless they are
there, and the script that sets the pointer sees them and removes it. With *several slots*, no script can touch
pointer and parts, so four requests do the work:

1. *register* (leader): the attempt gets a lease, and a number from a counter that only grows. Name and number together
   are used once, so a late copy of this request makes another attempt, which nobody uses. (The publisher of a version
   asks for the next number, and for another one if that is taken; a late copy is refused, which can only do less.)
2. *write* (node): the part is written with an expiry, unless it is there.
3. *persist* (node): the expiry is removed. Replies to 2 and 3 prove that the part will stay.
4. *commit* (leader): the attempt becomes real if it still has its lease. Otherwise, the reply is "fenced".

A sweeper ends leases, removes the parts of attempts that are over, and forgets these. Parts that arrive after that
belong to attempts that the leader does not know: `doctor --fix` lists parts, asks the leader about them, and then
removes them.

In a *round*, a session's entry says which attempt of its gradient was counted, until the server forgets the session. A
taker takes the round, reads the parts, and acknowledges, which gives them up; another one may recover the round. A
process may compact: it replaces the attempts of a round by one with their sum. A deletion ends it all, and a new round
with another incarnation begins. In a *record*, a version follows another one, whose blob is retired: it goes when the
version after the next is published, and readers read until then.

Between any two steps, each process may die; requests may be late, even after their sender has begun anew, and arrive
twice; leases and expiries may be over at any time. One node stands for all others, and one part for all parts. A leader
may fail over, once, to a replica that has received an earlier state of it. What the leader alone knew is lost then,
which callers are told, but what the replica knows must still be there.
"""

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from state_search import Search

# Who makes it, and a number that stands for its name.
Attempt = tuple[int, int]
Attempts = frozenset[Attempt]
NONE = frozenset()
# The version that is there from the beginning.
FIRST = (-1, 0)
# What a session's entry says besides the name of the attempt that was counted.
NOTHING, FORGOTTEN = -1, -2


@dataclass(frozen=True)
class Rules:
    """What the protocol insists on. A test switches each of them off and expects the search to find harm.

    Attributes:
        writes_only_new: a write leaves a part alone that is there, so a late copy gives no expiry to one that counts.
        proof_before_commit: an attempt becomes real only if its parts are there, or its maker knows that they stay.
        persists: the expiry of a part is removed.
        renews_only_expiring: a late renewal gives no expiry to a part that has none.
        renewal_needs_lease: a late renewal gives no lease to an attempt that was given up.
        once: a gradient counts once, whichever of its attempts is committed.
        keeps_what_counts: after "duplicate", a maker removes its parts only if another attempt was counted.
        removes_only_with_proof: a maker that the server has forgotten removes nothing.
        same_incarnation: nothing counts in another incarnation than the one that it was made for.
        replaces_what_is_there: a sum takes the place of gradients only if all of them are still in the round.
        frees_what_was_swapped: who compacts frees what the sum was to replace only if the reply says that it did.
        lease_at_commit: an attempt without its lease does not become real.
        numbers_are_used_once: the leader's counter only grows, so no number is given twice.
        names_outlive_failovers: the name of an attempt contains something random, so that it is not used again by a
            leader whose counter is that of a replica that lagged behind.
        fence_before_removal: the sweeper removes parts only after it has ended the lease at the leader.
        confirmation_before_removal: the sweeper removes parts only after the replica has confirmed that.
        asks_after_listing: gc asks the leader about an attempt after it has seen its part, and not before.
        asks_again: gc looks at the list and at what is real twice. Once, it may have asked two leaders: one that had
            counted the attempt, and then its replica, which had not heard of that.
        result_after_acknowledgement: a taker hands out its result only when its acknowledgement was accepted.
        follows: a version is published only if the one that it follows is still there.
        names_what_is_retired: the record names the retired blob, so that gc finds it there if it was published when gc
            read the list.
    """

    writes_only_new: bool = True
    proof_before_commit: bool = True
    persists: bool = True
    renews_only_expiring: bool = True
    renewal_needs_lease: bool = True
    once: bool = True
    keeps_what_counts: bool = True
    removes_only_with_proof: bool = True
    same_incarnation: bool = True
    replaces_what_is_there: bool = True
    frees_what_was_swapped: bool = True
    lease_at_commit: bool = True
    numbers_are_used_once: bool = True
    names_outlive_failovers: bool = True
    fence_before_removal: bool = True
    confirmation_before_removal: bool = True
    asks_after_listing: bool = True
    asks_again: bool = True
    result_after_acknowledgement: bool = True
    follows: bool = True
    names_what_is_retired: bool = True


class Maker(NamedTuple):
    """A process that makes an attempt real: of a gradient, of a sum of gradients, or of a version.

    Attributes:
        tries: how often it has begun anew; -1: it is dead or has finished.
        at: what it does next, or whose reply it waits for: begin, register, write, commit, remove, free.
        name: the name of its attempt; -1: it has none yet.
        follows: the version that its own follows.
    """

    tries: int = 0
    at: str = "begin"
    name: int = -1
    follows: Attempt = FIRST


OVER = Maker(-1, "")


class Request(NamedTuple):
    """A request on its way.

    Attributes:
        what: register, write, persist, commit, or "late write", a copy of a write.
        attempt: the attempt; for a registration, its maker and the try.
        follows: the version that it follows.
        incarnation: of the leader that it is for.
    """

    what: str
    attempt: Attempt
    follows: Attempt
    incarnation: int


class Taker(NamedTuple):
    """A process that takes a round.

    Attributes:
        at: take, recover, read, acknowledge, remove, or "" if it is dead or has finished.
        read: the attempts that are in its result.
    """

    at: str
    read: Attempts = NONE


class Leader(NamedTuple):
    """What lies in the slot of the pointer, besides parts.

    Attributes:
        named: the attempts that are real: the gradients of the round, or the version.
        outcomes: for each maker, the attempt that was counted, NOTHING or FORGOTTEN.
        passed: for each maker, the highest number that was given; -1: none.
        leased: attempts with a lease, and retired blobs.
        ended: attempts whose parts are to be removed.
        taken: the attempts in the round that was taken.
        owner: the taker that the taken round belongs to; -1: none was taken.
        retired: the blob that the record names as retired.
        followed: the versions that another one has followed.
        incarnation: how often it was deleted.
    """

    named: Attempts
    outcomes: tuple[int, ...]
    passed: tuple[int, ...]
    leased: Attempts = NONE
    ended: Attempts = NONE
    taken: Attempts = NONE
    owner: int = -1
    retired: Attempts = NONE
    followed: Attempts = NONE
    incarnation: int = 0

    @property
    def known(self):
        """The attempts that it knows."""
        return self.named | self.leased | self.ended | self.taken


class State(NamedTuple):
    """Everything that is stored, under way, and known to a process.

    Attributes:
        makers: the makers; the last one compacts, if the model does that.
        leader: the leader.
        takers: the first one, and the one that may recover its round.
        parts: attempts whose part is there: True if it has no expiry.
        flying: requests on their way.
        late: how many more requests may arrive twice.
        replaced: what the compactor's sum consists of.
        results: the gradients that were handed out, each as often as it was.
        reading: the version whose part the reader is about to read.
        reads: how often the reader may read the record yet.
        sweeping: the attempt whose part the sweeper is about to remove.
        confirmed: whether the replica has confirmed that this attempt is over.
        collecting: the attempt that gc has found.
        asked: how often gc has looked for it in vain, first in the list, then among what is real.
        replica: what the leader's replica has received; None: there is none, or it has taken over.
        failed_over: whether it has.
        harm: what has gone wrong.
    """

    makers: tuple[Maker, ...]
    leader: Leader
    takers: tuple[Taker, ...]
    parts: frozenset[tuple[Attempt, bool]]
    late: int
    reads: int
    flying: frozenset[Request] = frozenset()
    replaced: Attempts = NONE
    results: tuple[int, ...] = ()
    reading: Attempt | None = None
    sweeping: Attempt | None = None
    confirmed: bool = False
    collecting: Attempt | None = None
    asked: int = 0
    replica: Leader | None = None
    failed_over: bool = False
    harm: str = ""

    def has(self, attempt):
        """Whether its part is there."""
        return (attempt, False) in self.parts or (attempt, True) in self.parts

    def without(self, attempts):
        """Returns the parts of others."""
        return frozenset(part for part in self.parts if part[0] not in attempts)

    def lasting(self, attempt, lasts=True):
        """Returns the parts, this one with or without an expiry, if it is there."""
        return self.without(frozenset({attempt})) | {(attempt, lasts)} if self.has(attempt) else self.parts


@dataclass(frozen=True)
class AttemptModel:
    """The model, with the bounds of its search.

    Attributes:
        pointer: "round" or "record".
        slots: 1 if parts lie beside the pointer, else 2.
        makers: how many gradients are applied, or versions published, each by a process of its own.
        tries: how often each of them begins, at most.
        numbers: how many attempts of a maker the leader registers, at most.
        late: how many requests arrive twice, at most.
        compacts: whether one more process compacts the round.
        deletes: whether the round is deleted, once.
        forgets: whether the server forgets sessions.
        fails_over: whether the leader has a replica, which may take over.
        rules: the rules of the protocol.
    """

    pointer: str = "round"
    slots: int = 1
    makers: int = 1
    tries: int = 2
    numbers: int = 2
    late: int = 1
    compacts: bool = False
    deletes: bool = False
    forgets: bool = False
    fails_over: bool = False
    rules: Rules = Rules()

    def run(self):
        """Visits all states, and returns how many there are.

        Raises:
            Harm: one of them must not be.
        """
        return Search(self).run()

    def first(self):
        """Returns the state in which everything begins."""
        makers = self.makers + self.compacts
        is_round = self.pointer == "round"
        leader = Leader(
            named=NONE if is_round else frozenset({FIRST}), outcomes=(NOTHING,) * makers, passed=(-1,) * makers
        )
        return State(
            makers=(Maker(),) * makers,
            leader=leader,
            takers=(Taker("take"), Taker("recover")) if is_round else (),
            parts=frozenset() if is_round else frozenset({(FIRST, True)}),
            late=self.late,
            reads=0 if is_round else 2,
            replica=leader if self.fails_over else None,
        )

    # What must hold.

    def problem(self, state):
        """Returns what is wrong in a state."""
        leader = state.leader
        if state.harm:
            return state.harm
        for attempt in leader.named | leader.taken:
            if (attempt, True) not in state.parts:
                return f"the part of {attempt}, which is real, is gone, or will expire"
        if self.pointer == "record":
            if state.asked == self._questions and state.collecting in leader.leased:
                return f"gc removes the part of {state.collecting}, which has its lease"
            return None
        if leader.incarnation and leader.named:
            return "a gradient for what was deleted counts in what follows"
        counted = [*self._gradients(state, leader.named), *self._gradients(state, leader.taken)]
        if len(counted) > len(set(counted)) or set(self._gradients(state, leader.named)) & set(state.results):
            # A failover undoes what the replica has not received.
            return None if state.failed_over and len(counted) == len(set(counted)) else "a gradient is counted twice"
        if len(state.results) > len(set(state.results)) and not state.failed_over:
            return "a gradient was handed out twice"
        return None

    def problem_at_rest(self, state):
        """Returns what is wrong when nothing more can happen: nobody is left, and everything was delivered."""
        if state.leader.leased or state.leader.ended:
            return "an attempt stays listed forever"
        if any(attempt not in state.leader.named | state.leader.taken for attempt, _ in state.parts):
            return "a part stays forever"
        return None

    def _gradients(self, state, attempts):
        """Returns whose gradients are in attempts; a sum has those that it replaced."""
        found = []
        for maker, _ in attempts:
            found += [maker] if maker < self.makers else [of for of, _ in state.replaced]
        return found

    # What can happen next.

    def steps(self, state):
        """Yields what can happen next."""
        for which, maker in enumerate(state.makers):
            if maker.at:
                yield from self._maker_steps(state, which, maker)
        for request in state.flying:
            yield from self._arrival(state, request)
        for which, taker in enumerate(state.takers):
            if taker.at:
                yield from self._taker_steps(state, which, taker)
        yield from self._reader_steps(state)
        if self.slots > 1:
            yield from self._sweeper_steps(state)
            yield from self._gc_steps(state)
        yield from self._time_passes(state)
        yield from self._replica_steps(state)

    def _time_passes(self, state):
        leader, rules = state.leader, self.rules
        for attempt, lasts in state.parts:
            # With several slots, both requests are in one batch, and the expiry is longer than that is on its way.
            is_persisted = any(of.what in ("write", "persist") and of.attempt == attempt for of in state.flying)
            if not lasts and not (self.slots > 1 and is_persisted and rules.persists):
                yield f"the part of {attempt} expires", state._replace(parts=state.without(frozenset({attempt})))
            if lasts and not rules.renews_only_expiring and self.slots == 1:
                yield f"a renewal of {attempt} arrives", state._replace(parts=state.lasting(attempt, lasts=False))
        if not rules.renewal_needs_lease:
            # Otherwise, a renewal changes nothing, because leases and expiries end at any time.
            for attempt in leader.ended:
                renewed = leader._replace(ended=leader.ended - {attempt}, leased=leader.leased | {attempt})
                yield f"a renewal of {attempt} arrives", state._replace(leader=renewed)
        if self.forgets:
            for which, name in enumerate(leader.outcomes):
                if name >= 0:
                    yield f"the server forgets maker {which}", self._with_outcome(state, which, FORGOTTEN)
        if self.deletes and not leader.incarnation:
            gone = leader.known if self.slots > 1 else NONE
            anew = self.first().leader._replace(incarnation=1, ended=gone, passed=leader.passed, owner=2)
            parts = state.parts if self.slots > 1 else state.without(leader.known)
            yield "the accumulator is deleted", state._replace(leader=anew, parts=parts)

    @staticmethod
    def _with_outcome(state, which, outcome):
        outcomes = (*state.leader.outcomes[:which], outcome, *state.leader.outcomes[which + 1 :])
        return state._replace(leader=state.leader._replace(outcomes=outcomes))

    # Makers

    @staticmethod
    def _become(state, which, maker):
        return state._replace(makers=(*state.makers[:which], maker, *state.makers[which + 1 :]))

    def _send(self, state, which, maker, *sent):
        requests = {
            Request(what, (which, maker.tries if what == "register" else maker.name), maker.follows, 0) for what in sent
        }
        return self._become(state, which, maker)._replace(flying=state.flying | requests)

    def _maker_steps(self, state, which, maker):
        attempt = (which, maker.name)
        yield f"maker {which} dies", self._become(state, which, OVER)
        if maker.at not in ("begin", "remove", "free") and maker.tries + 1 < self.tries:
            # Its connection broke, and it does not know what became of its requests.
            yield f"maker {which} begins anew", self._become(state, which, Maker(maker.tries + 1))
        match maker.at:
            case "begin":
                if self.pointer == "record":
                    (version,) = state.leader.named
                    maker = maker._replace(follows=version)
                if which == self.makers:
                    if not state.leader.named or state.replaced:
                        return
                    state = state._replace(replaced=state.leader.named)
                if self.slots > 1:
                    registering = maker._replace(at="register")
                    yield f"maker {which} registers", self._send(state, which, registering, "register")
                else:
                    begun = maker._replace(at="commit", name=maker.tries)
                    yield f"maker {which} writes and commits", self._send(state, which, begun, "write", "commit")
            case "write":
                under_way = {of.what for of in state.flying if of.attempt == attempt}
                if not under_way & {"write", "persist"}:
                    proved = maker._replace(at="commit")
                    yield f"maker {which} has proof for {attempt}", self._send(state, which, proved, "commit")
            case "remove":
                parts = state.without(frozenset({attempt}))
                removed = self._become(state, which, OVER)._replace(parts=parts)
                yield f"maker {which} removes the part of {attempt}", removed
            case "free":
                freed = self._become(state, which, OVER)._replace(parts=state.without(state.replaced))
                yield f"maker {which} frees {set(state.replaced)}", freed

    def _after_registration(self, state, which, name):
        maker = state.makers[which]._replace(at="write", name=name)
        sent = ["write", *(["persist"] if self.rules.persists else [])]
        sent += [] if self.rules.proof_before_commit else ["commit"]
        return self._send(state, which, maker, *sent)

    def _after_commit(self, state, request, reply):
        """Returns what a maker does with the reply."""
        which, name = request.attempt
        maker = state.makers[which]
        if (maker.at, maker.name) != ("commit", name):
            return state
        mine = state.leader.outcomes[which] == name
        after = {
            "duplicate": OVER if mine and self.rules.keeps_what_counts else maker._replace(at="remove"),
            "forgotten": OVER if self.rules.removes_only_with_proof else maker._replace(at="remove"),
            # It was never counted, and cannot be any more.
            "fenced": maker._replace(at="remove"),
            "replaced": maker._replace(at="remove"),
            "unwritten": Maker(maker.tries + 1) if maker.tries + 1 < self.tries else OVER,
        }
        # With several slots, the sweeper removes them.
        if which == self.makers and self.slots == 1 and (reply == "counted" or not self.rules.frees_what_was_swapped):
            return self._become(state, which, maker._replace(at="free"))
        return self._become(state, which, after.get(reply, OVER))

    # What arrives

    def _arrival(self, state, request):
        without = state._replace(flying=state.flying - {request})
        again = state._replace(late=state.late - 1)
        what = f"{request.what} of {request.attempt} arrives"
        before = {"persist": "write", "commit": "write" if self.slots == 1 else ""}.get(request.what)
        if before and request._replace(what=before) in state.flying:
            # It follows the write on the same connection.
            return
        match request.what:
            case "register":
                yield what, self._register(without, request, replies=True)
                if state.late:
                    yield f"{what}, and will again", self._register(again, request, replies=True)
                    yield f"{what} without a reply, and will again", self._register(again, request, replies=False)
            case "write" | "late write":
                yield what, self._write(without, request)
                if request.what == "write" and state.late:
                    copy = request._replace(what="late write")
                    later = self._write(without, request)
                    yield f"{what}, and will again", later._replace(late=state.late - 1, flying=later.flying | {copy})
                if state.makers[request.attempt[0]].name != request.attempt[1]:
                    rest = {of for of in state.flying if of.attempt != request.attempt or of.what == "register"}
                    yield f"{request.what} of {request.attempt} is lost", state._replace(flying=frozenset(rest))
            case "persist":
                yield what, without._replace(parts=without.lasting(request.attempt))
            case "commit":
                commit = self._commit if self.pointer == "round" else self._publish
                after, reply = commit(without, request)
                yield f"{what}: {reply}", self._after_commit(after, request, reply)
                if state.late:
                    after, _ = commit(again, request)
                    yield f"{what}: {reply}, and will again", self._after_commit(after, request, reply)
                    yield f"{what}: {reply}, which is lost, and will again", after

    def _write(self, state, request):
        attempt = request.attempt
        if state.has(attempt) and self.rules.writes_only_new:
            return state
        # With several slots, a copy of the batch arrives whole.
        lasts = request.what == "late write" and self.slots > 1
        return state._replace(parts=state.without(frozenset({attempt})) | {(attempt, lasts)})

    def _register(self, state, request, *, replies):
        leader, (which, tries) = state.leader, request.attempt
        if self.pointer == "record" and request.follows not in leader.named:
            return state
        if self.rules.same_incarnation and request.incarnation != leader.incarnation:
            return state
        if self.rules.once and leader.outcomes[which] != NOTHING:
            # The reply is the outcome.
            return state
        if self.rules.numbers_are_used_once:
            number = leader.passed[which] + 1
        else:
            number = next(free for free in count() if (which, self._named(free, tries)) not in leader.known)
        if number >= self.numbers:
            # A bound for the search: this copy is lost.
            return state
        name = self._named(number, tries)
        passed = (*leader.passed[:which], max(number, leader.passed[which]), *leader.passed[which + 1 :])
        state = state._replace(leader=leader._replace(leased=leader.leased | {(which, name)}, passed=passed))
        maker = state.makers[which]
        is_asked = (maker.at, maker.tries) == ("register", tries)
        return self._after_registration(state, which, name) if replies and is_asked else state

    def _named(self, number, tries):
        """Returns what stands for the name of an attempt: its number, and what its maker made up."""
        return number + self.numbers * tries if self.rules.names_outlive_failovers else number

    def _proof(self, state, attempt):
        """Returns why an attempt cannot become real; "" if it can."""
        leader, rules = state.leader, self.rules
        if self.slots > 1:
            return "" if attempt in leader.leased or not rules.lease_at_commit else "fenced"
        return "" if state.has(attempt) or not rules.proof_before_commit else "unwritten"

    def _commit(self, state, request):
        """Lets a gradient, or a sum of gradients, count in the round."""
        leader, rules, attempt = state.leader, self.rules, request.attempt
        which, name = attempt
        outcome = leader.outcomes[which]
        replaced = state.replaced if which == self.makers else NONE
        given_up = state._replace(
            leader=leader._replace(leased=leader.leased - {attempt}, ended=leader.ended | (leader.leased & {attempt}))
        )
        if rules.same_incarnation and request.incarnation != leader.incarnation:
            return state, "forgotten"
        if rules.once and outcome != NOTHING:
            return given_up, "forgotten" if outcome == FORGOTTEN else "duplicate"
        if replaced and rules.replaces_what_is_there and not replaced <= leader.named:
            return given_up, "replaced" if self.slots == 1 else "over"
        if refused := self._proof(state, attempt):
            return state, refused
        counted = self._with_outcome(state, which, name)
        parts = counted.lasting(attempt) if self.slots == 1 and rules.persists else counted.parts
        if self.slots == 1:
            # The script leaves what is large to its client, with an expiry.
            parts = frozenset((of, lasts and of not in replaced) for of, lasts in parts)
        leader = counted.leader._replace(
            named=leader.named - replaced | {attempt},
            leased=leader.leased - {attempt},
            ended=leader.ended | (replaced if self.slots > 1 else NONE),
        )
        return counted._replace(leader=leader, parts=parts), "counted"

    def _publish(self, state, request):
        """Lets the record name a version."""
        leader, rules, attempt = state.leader, self.rules, request.attempt
        (before,) = leader.named
        if before == attempt:
            return state, "published"
        if rules.follows and before != request.follows:
            return state, "superseded"
        if refused := self._proof(state, attempt):
            return state, refused
        if request.follows in leader.followed:
            return state._replace(harm="two versions were published that follow the same one"), "published"
        removed = leader.retired & leader.leased
        parts = state.parts
        if self.slots == 1:
            # The script gives an expiry to what it retires, which is longer than a reader needs.
            parts = state.lasting(attempt) if rules.persists else parts
            parts = parts - {(before, True)} | {(before, False)}
        after = leader._replace(
            named=frozenset({attempt}),
            followed=leader.followed | {request.follows},
            retired=frozenset({before} if rules.names_what_is_retired else ()),
            leased=leader.leased - removed - {attempt} | ({before} if self.slots > 1 else NONE),
            ended=leader.ended | removed,
        )
        return state._replace(leader=after, parts=parts), "published"

    # Takers and readers

    def _taker_steps(self, state, which, taker):
        leader = state.leader

        def become(new, at=state):
            return at._replace(takers=(*at.takers[:which], new, *at.takers[which + 1 :]))

        def handed(at, attempts):
            return at._replace(results=(*at.results, *sorted(self._gradients(at, attempts))))

        yield f"taker {which} dies", become(Taker(""))
        if taker.at == "take" and leader.named and leader.owner < 0:
            granted = state._replace(leader=leader._replace(taken=leader.named, named=NONE, owner=which))
            yield f"taker {which} takes {set(leader.named)}", become(Taker("read"), granted)
        elif taker.at == "recover" and leader.owner == 0:
            recovered = state._replace(leader=leader._replace(owner=which))
            yield f"taker {which} recovers the round", become(Taker("read"), recovered)
        elif taker.at == "read" and leader.owner == which:
            # A part that is missing while the round is still ours is reported as lost data, and checked elsewhere.
            if all(state.has(attempt) for attempt in leader.taken):
                at = state if self.rules.result_after_acknowledgement else handed(state, leader.taken)
                yield f"taker {which} has read", become(Taker("acknowledge", leader.taken), at)
        elif taker.at == "acknowledge":
            if leader.owner == which:
                ended = leader.ended | (taker.read if self.slots > 1 else NONE)
                done = state._replace(leader=leader._replace(owner=2, taken=NONE, ended=ended))
                if self.slots == 1:
                    done = done._replace(parts=done.without(taker.read))
                accepted = handed(done, taker.read) if self.rules.result_after_acknowledgement else done
                # With a replica, the parts are left to the sweeper, who waits for that one.
                removes = self.slots > 1 and not self.fails_over
                then = taker._replace(at="remove") if removes else Taker("")
                yield f"taker {which} acknowledges", become(then, accepted)
            # Otherwise its round was recovered or deleted: it gets an error.
        elif taker.at == "remove":
            yield f"taker {which} removes the parts", become(Taker(""), state._replace(parts=state.without(taker.read)))

    def _reader_steps(self, state):
        if state.reading is None:
            if state.reads:
                (version,) = state.leader.named
                yield f"the reader sees {version}", state._replace(reading=version, reads=state.reads - 1)
        elif state.has(state.reading) or state.reading not in state.leader.named:
            # It has the values, or reads the record again.
            yield "the reader has read", state._replace(reading=None)
        # Otherwise it would report a loss; `problem` has found the same.

    # The sweeper, gc and the replica

    def _sweeper_steps(self, state):
        leader, attempt = state.leader, state.sweeping
        if attempt is not None:
            yield "the sweeper dies", state._replace(sweeping=None, confirmed=False)
            if self.fails_over and self.rules.confirmation_before_removal and not state.confirmed:
                received = None if state.replica is None else leader
                yield "the replica confirms that", state._replace(confirmed=True, replica=received)
                return
            forgotten = leader._replace(leased=leader.leased - {attempt}, ended=leader.ended - {attempt})
            parts = state.without(frozenset({attempt}))
            removed = state._replace(sweeping=None, confirmed=False, parts=parts, leader=forgotten)
            yield f"the sweeper removes the part of {attempt} and forgets it", removed
            return
        for due in leader.leased:
            # Its lease is over, or so the clock says.
            if self.rules.fence_before_removal:
                ended = leader._replace(leased=leader.leased - {due}, ended=leader.ended | {due})
                yield f"the sweeper ends the lease of {due}", state._replace(leader=ended, sweeping=due)
            else:
                yield f"the sweeper finds {due}", state._replace(sweeping=due)
        for due in leader.ended:
            yield f"the sweeper finds {due}", state._replace(sweeping=due)

    def _gc_steps(self, state):
        leader, attempt = state.leader, state.collecting
        listed = leader.leased | leader.ended
        real = leader.named | leader.taken | leader.retired
        done = state._replace(collecting=None, asked=0)
        if attempt is None:
            if self.rules.asks_after_listing:
                for found, _ in state.parts:
                    yield f"gc finds the part of {found}", state._replace(collecting=found)
                return
            for which in range(len(state.makers)):
                for name in range(self.numbers * self.tries):
                    if (which, name) not in listed | real:
                        unknown = state._replace(collecting=(which, name), asked=self._questions)
                        yield f"the leader does not know {(which, name)}", unknown
            return
        yield "gc dies", done
        if state.asked == self._questions:
            yield f"gc removes the part of {attempt}", done._replace(parts=state.without(frozenset({attempt})))
        elif attempt not in (real if state.asked % 2 else listed):
            what = "real" if state.asked % 2 else "listed"
            yield f"gc sees that {attempt} is not {what}", state._replace(asked=state.asked + 1)

    @property
    def _questions(self):
        """How many questions gc asks about an attempt."""
        return 4 if self.rules.asks_again else 2

    def _replica_steps(self, state):
        if state.replica is None:
            return
        if state.replica != state.leader:
            yield "the replica receives everything", state._replace(replica=state.leader)
        # What is on its way to the old leader or from there is lost. Who waits for a reply asks the new leader.
        to_nodes = {of for of in state.flying if of.what in ("write", "persist", "late write")}
        asked_again = {
            Request(maker.at, (which, maker.tries if maker.at == "register" else maker.name), maker.follows, 0)
            for which, maker in enumerate(state.makers)
            if maker.at in ("register", "commit")
        }
        # The sweeper's request, too, begins anew there.
        sweeping = state.sweeping if state.confirmed else None
        after = state._replace(leader=state.replica, replica=None, failed_over=True, sweeping=sweeping)
        yield "the replica takes over", after._replace(flying=frozenset(to_nodes | asked_again))
