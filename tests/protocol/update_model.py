"""A model of how an optimizer's updates are committed: chiefs, updaters, a sweeper, and a leader that may fail over.

It is the sibling of ``attempt_model``, and has what is different for updates. The name of a version is made of its
order and of the number of the attempt, so different processes write the same parts, some of them as bets:

1. A chief takes the round, or recovers that of its predecessor, and reads which version is published.
2. *register* (leader): the attempt gets a lease. If the same attempt was given up, the chief gets another number.
3. Updaters write the part of the version that they expect, with an expiry, at any time. So does the chief.
4. The chief makes the part stay, and sees that it is there.
5. *commit* (leader): if the version before is still the one that is published, the round is still this chief's, and the
   attempt has its lease, the version becomes visible and the round ends. The blob of the version before is retired. A
   chief whose program has computed the version also publishes it if the server has lost the round.

Between any two steps, each process may die, and requests may be delivered late and twice. One node with one part stands
for all of them. The leader may fail over once to a replica that has forgotten its last writes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from state_search import Search

# A version: the one before, the optimizer, and the number of the attempt. The first one is empty.
Name = tuple[Any, ...]
FIRST = ()
# In place of an optimizer: a version that was published whole.
WHOLE = -2
# What a part was computed from: the version before, and the optimizer.
Content = tuple[Name, int]


@dataclass(frozen=True)
class UpdateRules:
    """What the protocol insists on. A test switches each of them off and expects the search to find harm.

    Attributes:
        writes_only_new: a part that is there is not written again, so it does not get an expiry again.
        bets_expire: parts are written with an expiry.
        registers_before_persisting: the expiry is removed only when the leader lists the attempt.
        number_in_name: the name of a version has the number of the attempt.
        renumbers: an attempt that was given up is not registered again.
        verifies: the chief commits only if it has seen that the part is there, and has made it stay.
        one_script: the version becomes visible in the same instant in which the round ends.
        follows: a version is published only if the one that it follows is still there.
        optimizer_in_name: the name of a version has the optimizer.
        lease_at_commit: a version is published only if the attempt was not given up.
        confirms_fences: the sweeper removes parts only after the replica has confirmed that the attempt is over.
        takes_numbers: gc removes a part only after its number was used up, so that no attempt can get it.
        refuses_recovered: a version is not published if another chief has its round.
    """

    writes_only_new: bool = True
    bets_expire: bool = True
    registers_before_persisting: bool = True
    number_in_name: bool = True
    renumbers: bool = True
    verifies: bool = True
    one_script: bool = True
    follows: bool = True
    optimizer_in_name: bool = True
    lease_at_commit: bool = True
    confirms_fences: bool = True
    takes_numbers: bool = True
    refuses_recovered: bool = True


class Leader(NamedTuple):
    """What the leader stores.

    Attributes:
        version: the version that the record names.
        content: what its order says.
        optimizer: the optimizer in the record.
        number: how many attempts were registered.
        registered: the last of them.
        leased: blobs in the list with a lease, which may be over at any time.
        ended: blobs in the list whose parts are to be removed.
        owner: the chief that has the round of the next step; -1: nobody has, because it is not taken yet, or lost.
        rounds: how many rounds have ended.
    """

    version: Name = FIRST
    content: Content = (FIRST, -1)
    optimizer: int = 0
    number: int = 0
    registered: Name = FIRST
    leased: frozenset[Name] = frozenset()
    ended: frozenset[Name] = frozenset()
    owner: int = -1
    rounds: int = 0


class Chief(NamedTuple):
    """A chief.

    Attributes:
        at: what it does next: look, register, make, commit; "": it is dead or has not begun.
        lives: how often it may yet begin.
        previous: the version that it follows.
        number: the number of its attempt.
    """

    at: str = ""
    lives: int = 1
    previous: Name = FIRST
    number: int = 0


class Request(NamedTuple):
    """A request on its way.

    Attributes:
        what: register, write, commit, or end.
        chief: its sender; -1: an updater.
        name: the version.
        content: what its part is computed from.
        number: the number of the attempt.
    """

    what: str
    chief: int
    name: Name
    content: Content
    number: int


class State(NamedTuple):
    """Everything that is stored, under way, and known to a process.

    Attributes:
        chiefs: the chiefs. The second one has another optimizer.
        leader: the leader.
        replica: what a replica has of it; None: there is none any more.
        parts: blobs whose part is on the node: what it was computed from, and whether it has no expiry.
        flying: requests on their way.
        late: how many more requests may be delivered late.
        seen: the record that the updater has read: the version, the optimizer, the number.
        bets: how many bets the updater makes yet.
        sweeping: the blob whose part the sweeper is about to remove.
        collecting: the blob that gc has found, because its part has no expiry.
        condemned: what gc has done about it: "" nothing; "numbered": no attempt can get its number; "unlisted": the
            leader has said then that it does not list it.
        harm: what went wrong.
    """

    chiefs: tuple[Chief, ...]
    leader: Leader
    replica: Leader | None
    parts: frozenset[tuple[Name, Content, bool]]
    flying: frozenset[Request] = frozenset()
    late: int = 1
    seen: tuple[Name, int, int] | None = None
    bets: int = 1
    sweeping: Name | None = None
    collecting: Name | None = None
    condemned: str = ""
    harm: str = ""


@dataclass(frozen=True)
class UpdateModel:
    """The model, with the bounds of its search.

    Attributes:
        chiefs: how many chiefs there are, one after the other or at the same time.
        rounds: how many rounds there are.
        bets: how many parts updaters write.
        late: how many requests may be late.
        numbers: how many attempts may be registered.
        optimizers: how many optimizers the chiefs have.
        failover: whether the leader may fail over, once.
        collects: whether gc runs.
        replaces: whether the second chief publishes the version again, with a state of its own, before it begins.
        loses: whether the server may lose a round that was taken, and its chief publishes all the same what follows,
            as that of a program does.
        rules: the rules of the protocol.
    """

    chiefs: int = 1
    rounds: int = 1
    bets: int = 1
    late: int = 1
    numbers: int = 2
    optimizers: int = 1
    failover: bool = False
    collects: bool = True
    replaces: bool = False
    loses: bool = False
    rules: UpdateRules = UpdateRules()

    def run(self):
        """Visits all states, and returns how many there are.

        Raises:
            Harm: one of them must not be.
        """
        return Search(self).run()

    def first(self):
        """Returns the state in which everything begins."""
        leader = Leader()
        return State(
            chiefs=(Chief(),) * self.chiefs,
            leader=leader,
            replica=leader if self.failover else None,
            parts=frozenset({(FIRST, leader.content, True)}),
            late=self.late,
            bets=self.bets,
        )

    # What must hold.

    def problem(self, state):
        """Returns what is wrong in a state."""
        leader = state.leader
        if state.harm:
            return state.harm
        if (leader.version, leader.content, True) not in state.parts:
            return f"the part of {leader.version} is gone, will expire, or was computed from something else"
        used = _length(leader.version)
        if leader.owner >= 0 and used == self.rounds:
            return f"chief {leader.owner} has a round, and what follows from it is published"
        if used != leader.rounds:
            return f"{leader.rounds} rounds have ended, and {used} are in the version"
        return None

    def problem_at_rest(self, state):
        """Returns what is wrong when nothing more can happen."""
        if state.leader.leased or state.leader.ended:
            return "a blob stays in the list forever"
        # Otherwise, gc removes what a chief made stay after its attempt was given up and forgotten.
        if self.collects and any(name != state.leader.version for name, _, _ in state.parts):
            return "a part stays forever"
        return None

    # What can happen next.

    def _chiefs_steps(self, state):
        """Yields what the chiefs can do next."""
        for which, chief in enumerate(state.chiefs):
            if chief.at:
                yield f"chief {which} dies", _with_chief(state, which, chief._replace(at=""))
                yield from self._chief_steps(state, which, chief)
            elif chief.lives:
                # It may believe that its predecessor is dead, and be wrong.
                yield f"chief {which} begins", _with_chief(state, which, Chief("look", chief.lives - 1))

    def steps(self, state):
        """Yields what can happen next."""
        yield from self._chiefs_steps(state)
        for request in state.flying:
            yield f"{request} arrives", self._deliver(state._replace(flying=state.flying - {request}), request)
            yield f"{request} is lost", state._replace(flying=state.flying - {request})
        yield from self._updater_steps(state)
        yield from self._sweeper_steps(state)
        if self.collects:
            yield from self._gc_steps(state)
        for part in state.parts:
            if not part[2]:
                yield f"the part of {part[0]} expires", state._replace(parts=state.parts - {part})
        if self.loses and state.leader.owner >= 0:
            yield "the round is lost", state._replace(leader=state.leader._replace(owner=-1))
        if state.replica is not None:
            if state.replica != state.leader:
                yield "the replica catches up", state._replace(replica=state.leader)
            yield "the leader fails over", state._replace(leader=state.replica, replica=None)

    def _name(self, previous, optimizer, number):
        return (
            previous,
            optimizer if self.rules.optimizer_in_name else 0,
            number if self.rules.number_in_name else 0,
        )

    def _sent(self, state, request):
        """Yields what becomes of a request of a chief: it is delivered, and maybe a copy of it is late."""
        yield f"{request}", self._deliver(state, request)
        if state.late:
            late = state._replace(late=state.late - 1)
            yield f"{request}, and again", (self._deliver(late, request)._replace(flying=late.flying | {request}))
            dead = _with_chief(late, request.chief, state.chiefs[request.chief]._replace(at=""))
            yield f"{request} is late, and its chief dies", dead._replace(flying=dead.flying | {request})

    def _chief_steps(self, state, which, chief):
        leader, optimizer = state.leader, which % self.optimizers
        content = (chief.previous, optimizer)
        name = self._name(chief.previous, optimizer, chief.number)
        request = Request("", which, name, content, chief.number)
        match chief.at:
            case "look":
                if leader.rounds == self.rounds:
                    return
                if self.replaces and which == 1 and leader.version == FIRST:
                    yield "chief 1 publishes the first version again", _replaced(state)
                owned = state._replace(leader=leader._replace(owner=which, optimizer=optimizer))
                number = leader.number + (not _is_under_way(leader))
                reading = Chief("register", chief.lives, leader.version, number)
                yield f"chief {which} takes the round of {leader.version}", _with_chief(owned, which, reading)
            case "register":
                if not self.rules.registers_before_persisting:
                    early = self._persisted(state, name)
                    if early is not None:
                        yield f"chief {which} makes {name} stay", early
                for what, after in self._sent(state, request._replace(what="register")):
                    if after.chiefs[which].at:
                        yield what, self._after_registration(after, which, chief, name)
                    else:
                        yield what, after
            case "make":
                write = request._replace(what="write")
                there = any(part[0] == name for part in state.parts)
                if not there and write not in state.flying:
                    yield f"chief {which} writes {name}", state._replace(flying=state.flying | {write})
                if not self.rules.verifies or there:
                    made = self._persisted(state, name) or state
                    yield f"chief {which} makes {name} stay", _with_chief(made, which, chief._replace(at="commit"))
                elif name not in state.leader.leased:
                    yield f"chief {which} begins anew", _with_chief(state, which, chief._replace(at="look"))
            case "commit":
                done = _with_chief(state, which, chief._replace(at="look"))
                if not self.rules.one_script:
                    end = request._replace(what="end")
                    yield (
                        f"chief {which} ends the round",
                        self._deliver(done, end)._replace(flying=done.flying | {request._replace(what="commit")}),
                    )
                    return
                for what, after in self._sent(state, request._replace(what="commit")):
                    at = "look" if after.chiefs[which].at else ""
                    yield what, _with_chief(after, which, after.chiefs[which]._replace(at=at))

    def _after_registration(self, state, which, chief, name):
        """Returns what a chief does with the reply."""
        leader = state.leader
        if name in leader.leased and leader.registered == name:
            return _with_chief(state, which, chief._replace(at="make"))
        if leader.version == chief.previous and leader.number + 1 <= self.numbers:
            return _with_chief(state, which, chief._replace(number=leader.number + 1))
        return _with_chief(state, which, chief._replace(at="look" if leader.version != chief.previous else ""))

    def _persisted(self, state, name):
        parts = frozenset((of, content, lasts or of == name) for of, content, lasts in state.parts)
        return state._replace(parts=parts) if parts != state.parts else None

    def _deliver(self, state, request):
        leader, name = state.leader, request.name
        match request.what:
            case "write":
                found = [part for part in state.parts if part[0] == name]
                if found and self.rules.writes_only_new:
                    return state
                written = (name, request.content, not self.rules.bets_expire)
                return state._replace(parts=state.parts.difference(found) | {written})
            case "register":
                return state._replace(leader=self._register(leader, request))
            case "end":
                ended = leader.rounds + (leader.owner == request.chief and leader.version == request.content[0])
                return state._replace(leader=leader._replace(rounds=ended))
        return self._commit(state, request)

    def _register(self, leader, request):
        name = request.name
        if leader.version != request.content[0] or request.number > self.numbers:
            return leader
        if leader.registered == name and leader.number == request.number:
            if self.rules.renumbers and name not in leader.leased:
                return leader
        elif request.number != leader.number + 1:
            return leader
        return leader._replace(
            number=request.number,
            registered=name,
            leased=leader.leased | {name},
            ended=leader.ended - {name},
        )

    def _commit(self, state, request):
        leader, name, (previous, _), rules = state.leader, request.name, request.content, self.rules
        has_round = leader.owner == request.chief or (self.loses and leader.owner < 0) or not rules.refuses_recovered
        if leader.version == name or (rules.one_script and not has_round):
            return state
        if rules.follows and leader.version != previous:
            return state
        if rules.lease_at_commit and name not in leader.leased:
            return state
        if leader.version != previous:
            return state._replace(harm=f"{name} replaces {leader.version}, which it does not follow")
        return state._replace(
            leader=leader._replace(
                version=name,
                content=request.content,
                leased=leader.leased - {name} | {leader.version},
                # It ends the round of this chief.
                owner=leader.owner if leader.owner != request.chief else -1,
                rounds=leader.rounds + rules.one_script,
            )
        )

    def _updater_steps(self, state):
        leader = state.leader
        number = leader.number + (not _is_under_way(leader))
        record = (leader.version, leader.optimizer, number)
        if state.bets and state.seen != record:
            # It bets on what it has read, which may be outdated. Its write may be late.
            yield "an updater reads the record", state._replace(seen=record)
        if state.bets and state.seen is not None:
            previous, optimizer, number = state.seen
            bet = Request("write", -1, self._name(*state.seen), (previous, optimizer), number)
            yield f"an updater writes {bet}", state._replace(flying=state.flying | {bet}, bets=state.bets - 1)

    def _sweeper_steps(self, state):
        blob, leader = state.sweeping, state.leader
        if blob is not None:
            yield "the sweeper dies", state._replace(sweeping=None)
            confirmed = leader if state.replica is None else state.replica
            if self.rules.confirms_fences and blob not in confirmed.ended:
                return
            yield (
                f"the sweeper removes the part of {blob} and forgets it",
                state._replace(
                    sweeping=None,
                    parts=frozenset(part for part in state.parts if part[0] != blob),
                    leader=leader._replace(ended=leader.ended - {blob}),
                ),
            )
            return
        for due in leader.leased:
            ended = leader._replace(leased=leader.leased - {due}, ended=leader.ended | {due})
            yield f"the sweeper ends the lease of {due}", state._replace(leader=ended, sweeping=due)
        for due in leader.ended:
            yield f"the sweeper finds {due}", state._replace(sweeping=due)

    def _gc_steps(self, state):
        blob, leader = state.collecting, state.leader
        listed = leader.leased | leader.ended | {leader.version}
        if blob is None:
            for name, _, lasts in state.parts:
                # It looks at the list after it has seen the part.
                if lasts and name not in listed:
                    yield f"gc finds {name}", state._replace(collecting=name)
            return
        done = state._replace(collecting=None, condemned="")
        if state.condemned == "unlisted":
            parts = frozenset(part for part in state.parts if part[0] != blob)
            yield f"gc removes the part of {blob}", done._replace(parts=parts)
        elif not state.condemned and self.rules.takes_numbers:
            used = leader._replace(number=max(leader.number, blob[2] if blob else 0))
            yield f"gc uses up the number of {blob}", state._replace(leader=used, condemned="numbered")
        elif blob in listed:
            yield f"gc leaves {blob} alone", done
        else:
            yield f"the leader does not list {blob}", state._replace(condemned="unlisted")


def _length(name):
    """Returns how many rounds are in a version."""
    return (name[1] != WHOLE) + _length(name[0]) if name else 0


def _replaced(state):
    """Returns the state in which another version of the same step has taken the place of the first one."""
    name = (FIRST, WHOLE, 0)
    leader = state.leader._replace(version=name, content=(FIRST, WHOLE), leased=state.leader.leased | {FIRST})
    return state._replace(leader=leader, parts=state.parts | {(name, leader.content, True)})


def _is_under_way(leader):
    """Returns whether an attempt is registered that follows the version, or follows one that was replaced."""
    registered = leader.registered
    return registered not in (FIRST, leader.version) and registered[2] == leader.number


def _with_chief(state, which, chief):
    return state._replace(chiefs=(*state.chiefs[:which], chief, *state.chiefs[which + 1 :]))
