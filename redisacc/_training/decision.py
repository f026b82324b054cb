"""What a leader, or a worker, does next, as a pure function of what it sees: the first thing that is missing.

There are no repairs for accidents that somebody thought of. A leader looks at what there is, does one thing, and looks
again. Beginning, taking over, continuing, restoring and falling back are the same path. Whatever goes wrong on the way,
from a lost record to a refused write, leads back to the look.

- Each action is idempotent, and its script refuses if what was seen has changed: the incarnation, the version.
- Replies keep the view current, so an undisturbed step needs no look.
- No source is published before the workers that live have had time to claim a newer one, unless this process has led
  all the time, so that nobody can have one.
- Deletion is known by its mark and by the incarnations that this process has seen. What is gone without them is lost.
- While the program has a round, what is lost is restored around it, and it never gets the same round twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

Step = TypeVar("Step")


class Action(Enum):
    """What a leader does next."""

    STAND_BY = "take the lease"
    OPEN = "open the accumulator of the gradients"
    ASK = "ask the workers what they have"
    RESTORE = "publish the weights and the state that this process has"
    RESTORE_SAVED = "publish a checkpoint"
    RESTORE_OWN = "publish the weights of the worker in this process"
    HAND_OVER = "let a worker publish the weights that it has"
    GIVE_UP = "give up a version of which nobody has all parts"
    BEGIN = "publish the weights that the program has given"
    LEARN = "read what is published"
    SET_STEP = "set the step of an accumulator that nobody uses"
    CATCH_UP = "end earlier steps of the accumulator"
    REPLACE = "replace an accumulator whose gradients are of no use"
    RECOVER = "look for a round that was granted and not used"
    DISCARD = "remove a round that was used"
    STORE_QUORUM = "store what a step waits for"
    PROCEED = "do what the program wants"
    # Nothing helps any longer. Each raises an error that says what to do.
    END_SUPERSEDED = "another process leads"
    END_DELETED = "the run was deleted"
    END_LATER = "somebody has published a later step"
    END_LOST = "nobody has what is lost"


ENDS = frozenset(action for action in Action if action.name.startswith("END_"))


@dataclass
class View:
    """What a leader sees. Steps are those of weights; None means there are none.

    Attributes:
        lease: whether this process leads; "lost": another one does.
        is_deleted: whether the run, or its accumulator alone, was deleted, or replaced by another one.
        published: what is published.
        is_complete: whether it has all its parts.
        memory: what this process has published or read, and can publish again.
        is_learned: whether it is in the form that this process continues with.
        has_led_throughout: whether no other process can have led since then.
        may_be_lost: whether the server may have lost a run, if nothing is published.
        has_asked: whether all workers that live have had time to claim what they have.
        saved: the newest checkpoint. It has a state, unlike the next two.
        own: what the worker in this process has.
        claimed: the newest that another living worker has.
        may_be_rescued: whether a worker may have a version that has lost parts.
        has_lost: whether there was something that is lost, so that beginning again would hide that.
        is_open: whether there is an accumulator, and this process has a handle on it.
        gradients: its step.
        is_empty: whether it holds no gradients.
        is_useless: whether its round cannot be used, because a part of a gradient is lost.
        has_quorum: whether it says what a step waits for.
        may_be_left: whether a round may have been granted and not used.
        round: the step of the round that this process has.
    """

    lease: str = "held"
    is_deleted: bool = False
    published: int | None = None
    is_complete: bool = True
    memory: int | None = None
    is_learned: bool = True
    has_led_throughout: bool = True
    may_be_lost: bool = False
    has_asked: bool = False
    saved: int | None = None
    own: int | None = None
    claimed: int | None = None
    may_be_rescued: bool = False
    has_lost: bool = False
    is_open: bool = False
    gradients: int = 0
    is_empty: bool = True
    is_useless: bool = False
    has_quorum: bool = False
    may_be_left: bool = True
    round: int | None = None


def next_action(view: View) -> Action:
    """Returns what to do next."""
    if view.lease != "held":
        return Action.STAND_BY if view.lease == "none" else Action.END_SUPERSEDED
    if view.is_deleted:
        return Action.END_DELETED
    if view.published is None:
        return _to_publish(view)
    if view.memory is None:
        return _to_learn(view, view.published)
    return _to_proceed(view, view.published, view.memory)


def _first(*missing: tuple[bool, Step]) -> Step:
    """Returns the action of the first condition that is true."""
    return next(action for is_missing, action in missing if is_missing)


def source_of(view: View) -> tuple[int, Action] | None:
    """Returns the newest source of weights if what is published is older, or nothing is: its step, and what to do."""
    if view.memory is not None and (view.has_led_throughout or view.published is not None):
        return view.memory, Action.RESTORE
    sources = [
        (view.memory, Action.RESTORE),
        (view.saved, Action.RESTORE_SAVED),
        (view.own, Action.RESTORE_OWN),
        (view.claimed, Action.HAND_OVER),
    ]
    there = [(step, action) for step, action in sources if step is not None]
    # Of equal steps, the first, which has more.
    return max(there, key=lambda one: one[0], default=None)


def _to_publish(view: View) -> Action:
    """Returns what to do while nothing is published."""
    if not (view.memory is not None and view.has_led_throughout) and view.may_be_lost and not view.has_asked:
        return Action.ASK
    source = source_of(view)
    if source is None and view.has_lost:
        return Action.END_LOST
    # It comes before the weights: a worker that finds these also finds it, at their step.
    if not view.is_open:
        return Action.OPEN
    step, action = source or (0, Action.BEGIN)
    # If this process has the round of this step, gradients are for the next one.
    wanted = step + (view.round == step)
    # One that is ahead may have rounds of later steps, too.
    is_usable = view.is_empty and view.gradients < wanted
    return _first(
        (view.gradients == wanted, action),
        (True, Action.SET_STEP if is_usable else Action.REPLACE),
    )


def _to_learn(view: View, published: int) -> Action:
    """Returns what to do while something is published, and this process does not know it."""
    # What the worker in this process has lacks the state, so it counts only if that is lost.
    source = source_of(view if view.has_lost else replace(view, own=None))
    is_older = source is not None and source[0] > published
    # To continue, an optimizer needs no parts of it, and reducers may have what is lost.
    is_gone = view.has_lost and not view.is_complete and not is_older
    return _first(
        (is_gone and source is None and not view.may_be_rescued, Action.END_LOST),
        (not view.is_open, Action.OPEN),
        (is_gone, Action.GIVE_UP),
        (is_older, Action.LEARN if source is None else source[1]),
        (True, Action.LEARN),
    )


def _to_proceed(view: View, published: int, memory: int) -> Action:
    """Returns what to do while something is published, and this process has something."""
    found, is_next = view.round, view.gradients == memory
    return _first(
        # It may be this process that has published what follows from its round, without hearing of it.
        (found == memory and published == memory + 1, Action.PROCEED),
        (published > memory, Action.END_LATER),
        (not view.is_open, Action.OPEN),
        (published < memory or not view.is_complete, Action.RESTORE),
        (not view.is_learned, Action.LEARN),
        (view.is_useless, Action.REPLACE),
        (found == memory, Action.PROCEED),
        (found is not None, Action.DISCARD if found is not None and found < memory else Action.REPLACE),
        (view.may_be_left, Action.RECOVER),
        # The round in between may have been in the memory of a leader that has died.
        (not is_next, Action.CATCH_UP if view.gradients < memory else Action.REPLACE),
        (not view.has_quorum, Action.STORE_QUORUM),
        (True, Action.PROCEED),
    )


class Next(Enum):
    """What a worker does next whose training is gone."""

    WAIT = "wait, and claim what it has"
    CONTINUE = "continue with what is there"
    BEGIN_AGAIN = "continue with another run of this name"
    END = "say that it was deleted"


@dataclass
class Found:
    """What such a worker sees.

    Attributes:
        is_deleted: whether the parameters that it knows were deleted.
        is_there: whether parameters are published.
        is_other: whether these are others, in place of those that the server has lost.
        has_gradients: whether there is an accumulator.
        has_waited: whether it has waited for longer than a leader takes that replaces one.
    """

    is_deleted: bool = False
    is_there: bool = False
    is_other: bool = False
    has_gradients: bool = False
    has_waited: bool = False


def next_of_follower(found: Found) -> Next:
    """Returns what a worker does next."""
    return _first(
        (found.is_deleted, Next.END),
        (not found.is_there, Next.WAIT),
        (not found.has_gradients, Next.END if found.has_waited else Next.WAIT),
        (found.is_other, Next.BEGIN_AGAIN),
        (True, Next.CONTINUE),
    )
