"""Every state that a leader may see: what it does next leads somewhere, and makes no newer weights unreachable.

The model has the world, which loses things, and the leader's view of it. It does not model how an action is done: that
each of them survives losses and outages is tested with real servers in ``training/test_reconciliation.py``.
"""

import itertools
from dataclasses import dataclass, replace

import pytest

from redisacc._training.decision import ENDS, Action, Found, Next, View, next_action, next_of_follower, source_of

# From any state, this many actions suffice if nothing else happens.
BOUND = 16
# Steps that weights may have, and that of a training that nobody has seen: None.
STEPS = (None, 1, 2)


@dataclass(frozen=True)
class World:
    """What there is, and what the leader knows of it.

    Attributes:
        view: what the leader sees.
        has_parts: whether somebody still has all parts of what the leader remembers.
        workers: what living workers of other processes have; they claim it if they are asked.
        hands_over: whether such a worker publishes it, or dies before.
    """

    view: View
    has_parts: bool = True
    workers: int | None = None
    hands_over: bool = True


def seen(world):
    """Returns the world as the leader sees it after a look."""
    view = world.view
    if view.published is not None:
        return replace(world, view=replace(view, may_be_lost=False, has_asked=False, claimed=None))
    claimed = world.workers if view.has_asked else None
    return replace(world, view=replace(view, claimed=claimed, is_complete=True))


def publish(view, step):
    return replace(view, published=step, is_complete=True, has_quorum=False, has_led_throughout=True)


def forget(world):
    """Nobody has what the leader remembered."""
    return replace(world, view=replace(world.view, memory=None, has_lost=True, round=None))


def done(action, world):
    """Returns the world after an action of the leader that succeeds."""
    view = world.view
    if action is Action.STAND_BY:
        view = replace(view, lease="held")
    elif action is Action.OPEN:
        gradients = view.gradients if view.is_open else 0
        view = replace(view, is_open=True, gradients=gradients, has_quorum=False, may_be_left=True)
    elif action is Action.ASK:
        view = replace(view, has_asked=True)
    elif action is Action.RESTORE:
        if not world.has_parts:
            return forget(world)
        view = replace(publish(view, view.memory), may_be_left=True, is_learned=view.published is not None)
    elif action is Action.RESTORE_SAVED:
        view = publish(view, view.saved)
    elif action is Action.RESTORE_OWN:
        view = publish(view, view.own)
    elif action is Action.HAND_OVER:
        if not world.hands_over:
            return replace(world, workers=None, hands_over=True, view=replace(view, has_lost=True))
        view = publish(view, view.claimed)
    elif action is Action.GIVE_UP:
        view = replace(view, published=None, is_open=False, may_be_lost=True, has_asked=False, gradients=0)
    elif action is Action.BEGIN:
        view = replace(publish(view, 0), memory=0, is_learned=True)
    elif action is Action.LEARN:
        if not (view.is_complete or world.has_parts):
            return forget(world)
        view = replace(view, memory=view.published, is_learned=True, has_lost=False)
    elif action is Action.SET_STEP:
        step, _ = source_of(view)
        view = replace(view, gradients=step + (view.round == step))
    elif action is Action.CATCH_UP:
        view = replace(view, gradients=view.memory, is_empty=True, may_be_left=True)
    elif action is Action.REPLACE:
        view = replace(view, is_open=False, is_useless=False, is_empty=True, gradients=0, round=None)
    elif action is Action.RECOVER:
        view = replace(view, may_be_left=False)
    elif action is Action.DISCARD:
        view = replace(view, round=None, may_be_left=True)
    elif action is Action.STORE_QUORUM:
        view = replace(view, has_quorum=True)
    else:
        raise AssertionError(action)
    return replace(world, view=view)


def reached(world):
    """Returns the actions from a state on, and the world in the end, if nothing else happens."""
    actions = []
    while True:
        world = seen(world)
        action = next_action(world.view)
        actions.append(action)
        if action is Action.PROCEED or action in ENDS:
            return actions, world
        assert len(actions) <= BOUND, f"no end: {actions} {world}"
        world = done(action, world)


def worlds():
    """Yields states: what is published and known, and by whom; how the rest is."""
    flags = (False, True)
    for published, memory, saved, own, workers in itertools.product(STEPS, repeat=5):
        for complete, throughout, lost, has_parts, hands_over in itertools.product(flags, repeat=5):
            others = [step for step in (published, saved, own, workers) if step is not None]
            if (published is None and not complete) or (memory is None and not (has_parts and throughout)):
                continue
            if memory is not None and throughout and max(others, default=memory) > memory:
                # Somebody else has led.
                continue
            for open_, gradients, empty in ((False, 0, True), (True, 0, True), (True, 2, True), (True, 2, False)):
                view = View(
                    published=published,
                    is_complete=complete,
                    memory=memory,
                    has_led_throughout=throughout,
                    may_be_lost=memory is not None or lost or workers is not None,
                    saved=saved,
                    own=own,
                    may_be_rescued=own is not None or workers is not None,
                    has_lost=lost,
                    is_open=open_,
                    gradients=gradients,
                    is_empty=empty,
                )
                yield World(view, has_parts, workers, hands_over)


def known_to_living(world):
    """Returns the newest step of weights that somebody who lives still has."""
    view = world.view
    has = [view.published if view.is_complete else None, view.saved, view.own]
    has.append(world.workers if world.hands_over else None)
    has.append(view.memory if world.has_parts else None)
    return max((step for step in has if step is not None), default=None)


def test_every_state_leads_to_the_newest_weights_or_to_a_message():
    """While something is published, workers go back to it: what it has, unlike theirs, is a state."""
    # One test, because each process that runs one of several would walk through all states.
    every = list(worlds())
    assert len(every) > 10_000
    for world in every:
        actions, last = reached(world)
        memory, newest, published = world.view.memory, known_to_living(world), last.view.published
        if Action.BEGIN in actions:
            assert newest is None, (actions, world)
            assert not world.view.has_lost
        if actions[-1] is Action.PROCEED:
            assert published == last.view.memory, (actions, world)
            if world.view.published is None and newest is not None:
                assert published == newest, (actions, world)
            if memory is not None and world.has_parts:
                assert published >= memory, (actions, world)


@pytest.mark.parametrize("found", [None, 0, 1, 2])
@pytest.mark.parametrize("useless", [False, True])
def test_rounds(found, useless):
    """A round of an earlier step is discarded, one of this step is used, and a later one ends with its accumulator."""
    view = View(
        published=1, memory=1, is_open=True, gradients=1, has_quorum=True, may_be_left=False, round=found,
        is_useless=useless,
    )  # fmt: skip
    actions, _ = reached(World(view))
    assert actions[-1] is Action.PROCEED
    if useless or found == 2:
        assert actions[0] is Action.REPLACE
    else:
        assert actions[:-1] == {None: [], 0: [Action.DISCARD, Action.RECOVER], 1: []}[found]


def test_what_is_lost_is_restored_around_the_body_of_the_loop():
    """The accumulator begins at the next step, so gradients of the round that the body has count no second time."""
    view = View(memory=1, round=1, may_be_left=False)
    actions, last = reached(World(view))
    assert actions == [Action.OPEN, Action.SET_STEP, Action.RESTORE, Action.LEARN, Action.PROCEED]
    assert last.view.gradients == 2
    assert last.view.round == 1


def test_an_accumulator_that_is_ahead_of_all_weights_is_replaced():
    """A leader died after it had opened one for weights that nobody has any longer."""
    actions, last = reached(World(View(is_open=True, gradients=7)))
    assert actions[:3] == [Action.REPLACE, Action.OPEN, Action.BEGIN]
    assert actions[-1] is Action.PROCEED
    assert last.view.gradients == 0


def test_what_follows_from_the_round_may_be_published_already():
    """The reply was lost. The same call finds out whether it was this process that has published it."""
    view = View(published=2, memory=1, is_open=True, gradients=2, has_quorum=True, round=1)
    assert next_action(view) is Action.PROCEED
    assert next_action(replace(view, round=None)) is Action.END_LATER


@pytest.mark.parametrize(
    ("view", "action"),
    [
        (View(lease="none"), Action.STAND_BY),
        (View(lease="lost", published=1, memory=1), Action.END_SUPERSEDED),
        (View(is_deleted=True, memory=1), Action.END_DELETED),
        (View(published=2, memory=1), Action.END_LATER),
    ],
)
def test_what_ends_it(view, action):
    assert next_action(view) is action


@pytest.mark.parametrize("values", [*itertools.product((False, True), repeat=5)])
def test_a_worker_continues_only_with_what_is_there(values):
    deleted, there, other, gradients, waited = values
    action = next_of_follower(Found(deleted, there, other, gradients, waited))
    assert (action is Next.END) == (deleted or (there and not gradients and waited))
    assert (action is Next.WAIT) == (not deleted and not (there and (gradients or waited)))
    if action in (Next.CONTINUE, Next.BEGIN_AGAIN):
        assert (action is Next.BEGIN_AGAIN) == other
