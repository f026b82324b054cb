"""Every stored value, damaged in every way, and everything that people do with it: a typed error, or the right value.

Whatever is under the keys, each use ends soon, with little memory, in a result or an error of redisacc that is short
and can be printed, and so are its causes and what is logged. A result is that of the undamaged value. Reading changes
nothing. A refused call changes nothing, except that a round may have been granted, which loses no gradient. An
accumulator can be deleted. And at least one use notices each damage that is not a possible value.
"""

import contextlib
import functools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import redis
from damages import WORDS, damages
from stored import STORED
from support.servers import contents
from uses import (
    Use,
    attempt,
    commands,
    index_script,
    of_accumulator,
    of_parameters,
    of_training,
    on_a_loop,
    opening,
    pages,
    served,
)
from worlds import HEAD, WORLDS, Rounds, Trained

import redisacc
from redisacc._arrays.dtypes import find_dtype
from redisacc._arrays.leaf_values import tree_gradient
from redisacc._arrays.spec import AccumulatorSpec, described_by
from redisacc._format import buffered, in_place
from redisacc._format.keys import Keys
from redisacc._format.stored_text import round_shape_of

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey", "redis62")]

INDEX = (Path(__file__).parents[2] / "lua" / "inspect" / "index.lua").read_text()
# What a use that writes may leave of an accumulator or of parameters that it has deleted.
OF_THEIR_OWN = ("", "sums", "buffered", "inline", "workers", "sessions", "queue", "takers", "taken", "compacting")


class Watch:
    """Compares what uses find with what they found before the damage.

    Args:
        world: the database.
        slow: the uses that take longer.
        caplog: what is logged.
        several: how many calls that write are made with each damage, in turn.
    """

    def __init__(self, world, slow, caplog, *, several):
        self.world, self._slow, self._caplog = world, slow, caplog
        self._several = 100
        self._errors = []
        self._right = {}
        self._turn = 0
        self.look(lambda _: None, "nothing", learn=True)
        self.raise_all()
        self._several = several

    def raise_all(self):
        """Raises what was wrong."""
        if self._errors:
            notes = [f"{' '.join(error.__notes__)}: {error!r:.100}" for error in self._errors]
            raise ExceptionGroup("\n".join([f"{len(notes)} wrong", *notes[:100]]), self._errors[:5])

    def _of(self, handle):
        of = of_accumulator if isinstance(self.world, Rounds) else of_parameters
        return list(of(self.world, handle))

    def look(self, damage, where, *, fits=False, learn=False):
        """Tries everything on a damaged world. Returns whether anything refused it.

        Args:
            damage: what damages it.
            where: says what and where, for errors.
            fits: whether the damaged value is one that may be there, so that results may differ.
            learn: whether what is found is what is right.
        """
        self._fits, self._learn, self._noticed, self._where = fits, learn, False, where
        world, opened = self.world, []
        world.restore()
        old = world.open()
        damage(world.client)
        before = contents(world.client)
        # Handles that were opened before the damage, and after it.
        for use in (*opening(world, opened), *self._of(old)):
            if not use.writes:
                self._try(use, before)
                # It adds a name that is not listed.
                before = contents(world.client) if use.name.startswith("open") else before
        for handle in opened:
            for use in self._of(handle):
                if not use.writes:
                    self._try(use._replace(name=f"{use.name} (opened later)"), before)
            handle.close()
        writing = [use.name for use in self._of(old) if use.writes]
        old.close()
        for name in self._some(writing, self._several):
            world.restore()
            with world.open() as handle:
                damage(world.client)
                self._try(next(use for use in self._of(handle) if use.name == name), contents(world.client))
        # What a training of an optimizer has stored is read by nothing else.
        always = of_training(world) if isinstance(world, Trained) else ()
        for use in (*always, *self._some(self._slow, 100 if learn else 2)):
            world.restore()
            damage(world.client)
            self._try(use, contents(world.client))
        self._turn += 1
        return self._noticed

    def _some(self, found, number):
        """Returns the next ones in turn, each once."""
        return [found[(self._turn * number + at) % len(found)] for at in range(min(number, len(found)))]

    def _try(self, use, before):
        """Tries a use on the damaged database, whose contents are given, and collects what is wrong."""
        try:
            refused, found = attempt(use, self._caplog)
            after = (True, None)
            if use.after is not None and not refused:
                after = attempt(Use(use.name, use.after), self._caplog)
            there = contents(self.world.client)
            # A chief whose wait was ended has begun. If it finds no weights, and no process that has some, it removes
            # gradients of steps that nobody knows.
            is_whole = refused and found is not redisacc.CancelledError
            if is_whole and use.writes and not use.name.startswith(("delete", "rm", "doctor --fix")):
                assert _gradients(there) == _gradients(before), "what was refused has lost gradients"
            elif not use.writes and not use.name.startswith("open"):
                assert there == before, "what reads has changed something"
            if use.name == "delete":
                self._check_deleted(before, there)
            # An error inside a script, which did not expect what it found.
            assert found is not redisacc.ServerError
            self._noticed |= refused
            if self._learn:
                self._right[use.name] = found, after[1]
            elif not self._fits:
                right = self._right[use.name]
                assert refused or found == right[0], f"it found something else: {found!r:.300}"
                assert after[0] or after[1] == right[1], f"after it, there is something else: {after[1]!r:.300}"
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"{self._where}; use: {use.name}")
            self._errors.append(error)

    def _check_deleted(self, before, there):
        """A record that is still that of this accumulator can be deleted, whatever it says."""
        record = before.get(HEAD.encode())
        if isinstance(record, dict) and record.get(b"incarnation") == self.world.incarnation:
            left = {key.decode(errors="replace").removeprefix(HEAD).removeprefix(":") for key in there}
            assert not left & {*OF_THEIR_OWN}, "it was not deleted"


def _gradients(found):
    """Returns all gradients in a database, in whatever round."""
    return sorted(str(value) for key, value in found.items() if b":sums" in key or b":part" in key or b":inline" in key)


@pytest.fixture(scope="module")
def serving():
    """Starts the exporter and the dashboard for a server, once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda url: stack.enter_context(served(url)))


@pytest.fixture
def watch(
    request,
    real_client,
    real_server,
    serving,
    durations,
    caplog,
    monkeypatch,
    tmp_path,
    everything,
):
    caplog.set_level(logging.DEBUG, "redisacc")
    monkeypatch.chdir(tmp_path)
    world = WORLDS[request.param](real_client)
    url, in_place = real_server.url, "in place" in request.param
    slow = [*on_a_loop(world, url), *commands(url, in_place=in_place), *pages(serving(url))]
    if not isinstance(world, Trained):
        slow += of_training(world)
    slow.append(Use("index.lua", lambda: index_script(real_client, INDEX)))
    durations(call=2.0, gathering=0.2, continued_within=0.0, look_after=0.1)
    return Watch(world, slow, caplog, several=100 if everything else 3)


def some(places, first, everything):
    """Yields each damage of each place; without --all, one of every second place.

    Worlds have many places in common, and begin with the first or the second, so that all damages have their turn.
    """
    for turn, place in [*enumerate(places)][0 if everything else first % 2 :: 1 if everything else 2]:
        found = [(place, name, change, fits) for name, (change, fits) in place.damages.items()]
        yield from found if everything else [found[turn * 7 % len(found)]]


# Each kind of accumulator and each storage. `make check` has all pairs of them.
USUAL = (
    "published", "trained", "tree parts", "dense partitions", "unbounded in place", "int8 inline",
)  # fmt: skip


@pytest.mark.slow(keep="|".join(rf"-{name}\]" for name in USUAL))
@pytest.mark.parametrize("watch", WORLDS, indirect=True)
def test_one_damage(request, watch, everything):
    unnoticed = []
    watch.world.restore()
    first = [*WORLDS].index(request.node.callspec.params["watch"])
    for place, name, change, fits in some(list(watch.world.places()), first, everything):
        where = f"{place.what}: {name}"
        if not watch.look(change, where, fits=fits) and not fits:
            unnoticed.append(where)
    watch.raise_all()
    assert not unnoticed, "nobody notices:\n" + "\n".join(unnoticed)


@pytest.mark.slow(keep="weighted sparse")
@pytest.mark.parametrize("watch", WORLDS, indirect=True)
def test_several_damages(watch, everything, request):
    long = request.config.getoption("--long")
    seed = random.randrange(10**9) if long else 1
    drawn = random.Random(seed)
    watch.world.restore()
    places = list(watch.world.places())
    for _ in range(2000 if long else 100 if everything else 10):
        chosen = [
            (place, *drawn.choice([*place.damages.items()])) for place in drawn.sample(places, drawn.randint(2, 4))
        ]

        def damage(client, chosen=chosen):
            for _, _, (change, _) in chosen:
                # One may be that the key of another is gone, or has another type.
                with contextlib.suppress(redis.ResponseError, redis.DataError):
                    change(client)

        where = f"seed {seed}: " + "; ".join(f"{place.what}: {name}" for place, name, _ in chosen)
        watch.look(damage, where, fits=any(fits for _, _, (_, fits) in chosen))
    watch.raise_all()


def test_the_session_of_a_handle_that_goes_on(real_client, caplog):
    """Above, each handle is a new one. This one has a session, which is damaged."""
    world, key = Rounds(real_client, "dense", "in place"), f"{HEAD}:sessions"
    before = real_client.hkeys(key)
    with world.open() as acc:
        world.apply(acc)
        (session,) = set(real_client.hkeys(key)) - set(before)
        entry = real_client.hget(key, session)
        for damage in damages(STORED[":sessions"]["<id>"], entry):
            if damage.value is None or damage.fits:
                continue
            real_client.hset(key, session, damage.value)
            there = contents(real_client)
            for call in (lambda: world.apply(acc), lambda: acc.set_global_step(7)):
                assert attempt(Use(damage.name, call), caplog) == (True, redisacc.CorruptDataError), damage
            assert contents(real_client) == there
        real_client.hset(key, session, entry)
        assert world.apply(acc)


def test_each_damage_of_a_header_a_row_and_a_shape():
    """Above, a value gets one of its damages. These are many, so their parsers are tried with all of them."""
    keys, leaves = Keys("w"), {"d": ("float32", (2,)), "s": redisacc.Sparse("float32", (5, 2))}
    tree = AccumulatorSpec.of_tree(*described_by(leaves), reduction_type="MEAN", missing="skip")
    rows = AccumulatorSpec.of_array("sparse", find_dtype("float32"), (5, 2), reduction_type="MEAN", chunk=1)
    gradient = tree_gradient(tree, {"d": [1, 2], "s": ([1], [[1, 2]])}, "grad")
    for form, right, parse in (
        ("header", b"0 " + buffered.pack(keys, gradient).header, lambda value: buffered.parse(keys, value, tree, ())),
        (
            "row",
            (1).to_bytes(8, "little") + np.ones(2, "<f4").tobytes(),
            lambda value: in_place.unpack({**value, b"total": b"1 1"}, rows, (2,), "w"),
        ),
    ):
        parse({b"1": right})
        for damage in damages(form, right):
            with contextlib.suppress(redisacc.CorruptDataError):
                parse({} if damage.value is None else {b"1": damage.value})
    for text in {*WORDS["shape"]} - {b"[2,2,2]", b"[99999999999999]"}:
        with pytest.raises(redisacc.CorruptDataError, match="round_shape holds"):
            round_shape_of(keys.record, text.decode())
