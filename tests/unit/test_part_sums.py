"""Sums that grow part by part, whatever arrives in whatever order: compared with plain additions, bit for bit."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import redisacc
from redisacc._arrays.encodings import encode
from redisacc._arrays.leaf_values import tree_gradient
from redisacc._arrays.spec import AccumulatorSpec, described_by
from redisacc._format import buffered as buffered_format
from redisacc._format.attempts import PartsArrived
from redisacc._format.buffered import digest_of
from redisacc._format.keys import Keys
from redisacc._protocol.applying.attempts import written
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.sums import expected_gradients
from redisacc._protocol.sums.cells import SumOptions
from redisacc._protocol.sums.part_sums import PartFetch, PartSums, ReducerReliance
from redisacc._wire.waits import BLOCKING

KEYS = Keys("name")
# Small gradients are in several parts only in partitions. To a taker, parts are parts: these have the keys of one slot.
CUTS = {64: Keys("name", (0, 1, 2, 3, 4)), 128: Keys("name", (0, 1, 2))}
# Of the gradients, in turn.
WEIGHTS = [1.0, 0.5, 3.0]
ELEMENTS, ROWS = 45, 30


def spec_of(**leaves):
    return AccumulatorSpec.of_tree(*described_by(leaves), reduction_type="SUM")


SPECS = {
    "dense": spec_of(d=("float32", [ELEMENTS])),
    "sparse": spec_of(s=redisacc.Sparse("float32", [ROWS, 3])),
    "both": spec_of(d=("float32", [ELEMENTS]), e=("float64", [7]), s=redisacc.Sparse("float32", [ROWS, 3])),
    # Gradients have float16, and their sum float32.
    "wider": spec_of(d=("float16", [2 * ELEMENTS])),
    # Some blocks, if it travels as int8.
    "long": spec_of(d=("float32", [700]), e=("float64", [7]), s=redisacc.Sparse("float32", [ROWS, 3])),
}


def gradient_of(spec, seed):
    random = np.random.default_rng(seed)
    tree = {}
    assert spec.kind == "tree"
    for path, leaf in ((leaf.path, leaf) for leaf in spec.leaves):
        if leaf.is_sparse:
            rows = np.sort(random.choice(ROWS, int(random.integers(0, 20)), replace=False))
            tree[path] = (rows, (random.normal(size=(len(rows), 3)) * 10.0 ** random.integers(-3, 4)).astype("f4"))
        else:
            values = random.normal(size=leaf.shape) * 10.0 ** random.integers(-3, 3, leaf.shape)
            tree[path] = values.astype(leaf.dtype.storage)
    return tree_gradient(spec, tree, "a gradient")


class Server:
    """Strings under keys, and what happens while they are fetched."""

    waits = BLOCKING

    def __init__(self):
        self.strings = {}
        self.inline = {}
        self.between = iter(())
        # Returns a number below the given one.
        self.draw = lambda below: below - 1
        self.fetched = []

    def store(self, *uploads):
        """Writes all parts of gradients."""
        for upload in uploads:
            for part in range(len(upload.buffered.lengths)):
                self.strings[KEYS.part(upload.buffered.id, part)] = upload.bytes_of(part)

    def fetch(self, arrivals):
        """As ``Transport.fetch``: everything is requested ahead, and answered in order within a lane.

        Strings of several lanes arrive at the same time. A connection may break while they do.
        """
        requested, begun = list(arrivals.wanted()), dict[int, memoryview]()
        while requested:
            if self.draw(10) == 0:
                requested, begun = list(arrivals.wanted()), {}
                continue
            heads = {arrival.lane: arrival for arrival in reversed(requested)}
            arrival = heads[sorted(heads)[self.draw(len(heads))]]
            data = self.strings.get(arrival.key)
            if data is not None and arrival.lane not in begun:
                begun[arrival.lane] = arrivals.begin(arrival, len(data))
                begun[arrival.lane][: len(data) // 2] = data[: len(data) // 2]
                continue
            requested.remove(arrival)
            self.fetched.append(arrival.key)
            if data is None:
                arrivals.missing(arrival)
            else:
                begun.pop(arrival.lane)[len(data) // 2 :] = data[len(data) // 2 :]
                arrivals.finish(arrival)
            # A taker hears of something only when it asks what to fetch next.
            if isinstance(arrivals, PartFetch):
                next(self.between, None)
            requested += arrivals.more()

    def scatter(self, batches):
        return [self.pipeline(batch) for batch in batches]

    def pipeline(self, commands):
        replies = []
        for command in commands:
            if command[0] == "STRLEN":
                replies.append(len(self.strings.get(command[1], b"")))
            else:
                assert command[0] == "HMGET"
                replies.append([self.inline.get(name) for name in command[2:]])
        return replies


class Upload:
    """A gradient of the test.

    Attributes:
        buffered: its description; its place is known once it was announced or admitted.
    """

    def __init__(
        self,
        number,
        spec,
        seed,
        size,
        encoding="float32",
        *,
        inline=0,
    ):
        weight = WEIGHTS[seed % len(WEIGHTS)] if spec.can_weigh else 1.0
        self.gradient = replace(encode(gradient_of(spec, seed), encoding, spec), factor=weight)
        self.packed = buffered_format.pack(CUTS[size], self.gradient, inline)
        self.parts = written(KEYS.parts(f"g-{number}", len(self.packed.parts)), dict(enumerate(self.packed.parts)))
        place = b"0" if weight == 1 else f"0*{weight}".encode()
        fields = {f"g-{number}".encode(): place + b" " + self.packed.header}
        (self.buffered,) = buffered_format.parse(KEYS, fields, spec, ())
        self.place = None
        self.admitted = self.refused = False

    def bytes_of(self, part):
        argument = self.parts[part][2]
        return b"".join(argument) if isinstance(argument, tuple) else bytes(argument)

    def at(self, place):
        return replace(self.buffered, order=place)


def sum_parts(spec, uploads):
    """Returns the parts of the sum of gradients that are cut in the same way, in which a reducer would store it."""
    cuts = [found[1] for upload in uploads if (found := upload.buffered.cut) is not None]
    if not cuts or len(cuts) < len(uploads) or any(cut != cuts[0] for cut in cuts):
        return []
    total = spec.empty_sum((), where="the test")
    for upload in uploads:
        total.add(upload.gradient)
    sections = total.sum().sections
    return [
        b"".join(
            sections[piece.section].values.reshape(-1)[piece.first : piece.first + piece.number].tobytes()
            for piece in pieces
        )
        for pieces in cuts[0]
    ]


def assert_same_bits(one, other):
    """Checks that two sums are equal, bit for bit."""
    for found, expected in zip(one.sum().sections, other.sum().sections, strict=True):
        np.testing.assert_array_equal(found.values.view(np.uint8), expected.values.view(np.uint8))
        if expected.indices is not None:
            np.testing.assert_array_equal(found.indices, expected.indices)
            np.testing.assert_array_equal(found.counts, expected.counts)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_sum_is_that_of_the_round_in_the_order_of_places(durations, clock, data):
    durations(sum_patience=0)
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    inline = data.draw(st.sampled_from([0, 0, 300]))
    sizes = st.sampled_from([64, 64, 64, 128])
    encodings = data.draw(st.sampled_from([["float32"], ["bfloat16"], ["int8"], ["float32", "bfloat16", "int8"]]))
    uploads = [
        Upload(
            number,
            spec,
            data.draw(st.integers(0, 9)),
            data.draw(sizes),
            data.draw(st.sampled_from(encodings)),
            inline=inline,
        )
        for number in range(4)
    ]
    _play(spec, uploads, data, clock)


def _play(spec, uploads, data, clock):
    server, places = Server(), iter(range(1, 10**6))
    # By worker, places are known before anything arrives. A worker that was started again has two gradients.
    by_worker = data.draw(st.booleans())
    numbers = data.draw(st.lists(st.integers(0, 4), min_size=len(uploads), max_size=len(uploads)))
    random = data.draw(st.randoms(use_true_random=False))
    server.draw = random.randrange
    round_sum = spec.empty_sum((), where="the test")
    num_expected, reliance = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([None, ReducerReliance()]))

    sums = PartSums(
        server,
        round_sum,
        SumOptions(
            KEYS,
            num_expected,
            by_worker=by_worker,
            window=data.draw(st.sampled_from([1, 100, 10**6])),
            waiting=data.draw(st.sampled_from([0, 100, 10**6])),
            reduced=0,
        ),
        reliance,
    )
    inline = InlineReader(server, KEYS.current, ())

    def place_of(upload):
        return numbers[uploads.index(upload)] if by_worker else next(places)

    def is_repeated(upload):
        """Returns whether the round has a gradient of the same worker."""
        mine = numbers[uploads.index(upload)]
        return by_worker and any(
            other.admitted and numbers[place] == mine for place, other in enumerate(uploads) if other is not upload
        )

    def act():
        """Something that a worker does, which the taker may not hear of."""
        upload = data.draw(st.sampled_from(uploads))
        if reliance is not None and data.draw(st.booleans()):
            reduce()
            return
        if upload.place is not None and not sums.knows(upload.buffered.id) and data.draw(st.booleans()):
            # It is heard of late.
            sums.announce(upload.at(upload.place), admitted=upload.admitted)
            inline.expect([upload.at(upload.place)])
            return
        if upload.admitted or upload.refused:
            return
        heard = data.draw(st.booleans()) or data.draw(st.booleans())
        name, found = upload.buffered.id, upload.buffered
        what = data.draw(st.sampled_from(["begin", "part", "part", "part", "admit", "refuse", "stalled"]))
        if what == "begin" and upload.place is None and not found.inline:
            upload.place = place_of(upload)
            if heard:
                # Anybody may forge the place.
                forged = data.draw(st.sampled_from([0, 0, 0, 5, -5]))
                described = upload.at(max(upload.place + forged, 0))
                # Or the step moves before it is admitted, and with it the weight.
                moved = data.draw(st.sampled_from([1.0, 1.0, 0.5])) if spec.can_weigh else 1.0
                sums.announce(replace(described, factor=described.factor * moved))
        elif what == "part" and found.lengths:
            part = data.draw(st.integers(0, len(found.lengths) - 1))
            stage(upload, part)
            if heard:
                sums.arrive(PartsArrived(name, part + 1))
        elif what == "admit" and not is_repeated(upload):
            for part in range(len(found.lengths)):
                stage(upload, part)
            admit(upload)
            if heard:
                if not sums.knows(name) or data.draw(st.booleans()):
                    assert upload.place is not None
                    sums.announce(upload.at(upload.place), admitted=True)
                    inline.expect([upload.at(upload.place)])
                else:
                    sums.admit(name)
        elif what == "refuse" and data.draw(st.booleans()):
            upload.refused = True
            for part in range(len(found.lengths)):
                server.strings.pop(KEYS.part(name, part), None)
        elif what == "stalled":
            if data.draw(st.booleans()):
                clock.advance(1)
            sums.skip_stalled()

    def reduce():
        """Something that a reducer does: it stores a part of a sum of any gradients, or of the wrong length."""
        placed = [upload for upload in uploads if upload.place is not None and upload.buffered.lengths]
        if not placed:
            return
        placed.sort(key=lambda upload: upload.place or 0)
        chosen = placed if data.draw(st.booleans()) else data.draw(st.permutations(placed))
        chosen = chosen[:num_expected]
        digest = digest_of([upload.at(upload.place or 0) for upload in chosen])
        parts = sum_parts(spec, chosen)
        for number, part in enumerate(parts):
            if data.draw(st.integers(0, 3)):
                server.strings[KEYS.sum(digest, number)] = data.draw(st.sampled_from([part, part, part, part + b"x"]))
            if data.draw(st.booleans()):
                sums.sum_stored(digest, number)

    def stage(upload, part):
        key, length = KEYS.part(upload.buffered.id, part), upload.buffered.lengths[part]
        server.strings[key] = upload.bytes_of(part)
        assert len(server.strings[key]) == length

    def admit(upload):
        upload.admitted = True
        if upload.place is None:
            upload.place = place_of(upload)
        name = upload.buffered.id
        if upload.buffered.inline:
            server.inline[name] = upload.packed.data
        for part in range(len(upload.buffered.lengths)):
            assert KEYS.part(name, part) in server.strings

    def events():
        while True:
            if data.draw(st.booleans()):
                act()
            yield

    server.between = events()
    for _ in range(data.draw(st.integers(0, 12))):
        act()
        if data.draw(st.booleans()):
            stop = data.draw(st.booleans())
            sums.look_ahead(inline, lambda stop=stop: stop and data.draw(st.booleans()))
    server.between = iter(())
    taken = sorted((upload for upload in uploads if upload.admitted), key=lambda upload: upload.place or 0)
    if reliance is not None and data.draw(st.booleans()):
        for upload in uploads:
            if not upload.admitted and not upload.refused and not is_repeated(upload):
                for part in range(len(upload.buffered.lengths)):
                    stage(upload, part)
                admit(upload)
        taken = sorted((upload for upload in uploads if upload.admitted), key=lambda upload: upload.place or 0)
        for _ in range(3):
            reduce()
    complete(spec, sums, server, round_sum, *taken)


def test_what_changes_while_it_is_fetched_is_in_no_sum_that_is_stored():
    """The second gradient is announced with another weight when its parts are on their way already."""
    spec, server = SPECS["dense"], Server()
    first, second = (Upload(number, spec, 0, 64) for number in range(2))
    stored = []
    sums = PartSums(
        server,
        spec.empty_sum((), where="the test"),
        SumOptions(KEYS, 2, store=stored.append),
    )
    changed = replace(second.at(1), factor=2.0)

    def announce(gradient):
        sums.announce(gradient)
        sums.arrive(PartsArrived(gradient.id, len(gradient.lengths)))

    server.store(first, second)
    for place, upload in enumerate((first, second)):
        announce(upload.at(place))
    server.between = map(announce, [changed])
    sums.look_ahead(InlineReader(server, KEYS.current, ()), lambda: False)
    values = first.gradient.sections[0].values.reshape(-1)
    assert {part.number for part in stored} == set(range(len(changed.lengths)))
    for part in stored:
        (piece,), (elements,) = part.pieces, part.elements
        mine = values[piece.first : piece.first + piece.number]
        assert part.digest in {digest_of([first.at(0), changed]), digest_of([first.at(0), second.at(1)])}
        factor = 2 if part.digest == digest_of([first.at(0), changed]) else 1
        np.testing.assert_array_equal(elements, mine + factor * mine)


def test_a_gradient_that_was_added_whole_is_in_all_sums_once():
    """It was cut in another way than the others. Some cells contain what follows it, and lose that."""
    spec, server = SPECS["both"], Server()
    one, other, lost, late = (
        Upload(0, spec, 0, 64),
        Upload(1, spec, 3, 128),
        Upload(2, spec, 6, 64),
        Upload(3, spec, 9, 64),
    )
    round_sum = spec.empty_sum((), where="the test")
    sums = PartSums(server, round_sum, SumOptions(KEYS, 3))
    server.store(one, other, lost, late)
    for place, upload in enumerate((one, other)):
        sums.announce(upload.at(place), admitted=True)
    sums.announce(lost.at(2))
    last = len(lost.buffered.lengths) - 1
    sums.arrive(PartsArrived(lost.buffered.id, 1, None, last))
    sums.look_ahead(InlineReader(server, KEYS.current, ()), lambda: False)
    assert KEYS.part(lost.buffered.id, last) in server.fetched
    complete(spec, sums, server, round_sum, one, other, late)


@pytest.mark.parametrize("seed", range(40))
def test_what_was_requested_for_a_dropped_sum_is_ignored(seed, monkeypatch):
    """A gradient that precedes the others becomes known while these are on their way."""
    # The memory that was freed would be used again, and may hold the right bytes.
    dirty = SimpleNamespace(empty=lambda shape, dtype: np.full(shape, 0xEE, dtype), uint8=np.uint8)
    monkeypatch.setattr(expected_gradients, "np", dirty)
    random = Random(seed)
    spec, server = SPECS["sparse"], Server()
    uploads = [Upload(number, spec, number, 64) for number in range(1, 6)]
    round_sum = spec.empty_sum((), where="the test")
    sums = PartSums(server, round_sum, SumOptions(KEYS, 6))
    server.store(*uploads)
    for place in range(1, 5):
        sums.announce(uploads[place].at(place), admitted=True)

    def late():
        for _ in range(random.randrange(20)):
            yield
        sums.announce(uploads[0].at(0), admitted=True)

    server.draw = random.randrange
    server.between = late()
    sums.look_ahead(InlineReader(server, KEYS.current, ()), lambda: False)
    complete(spec, sums, server, round_sum, *uploads)


def complete(spec, sums, server, round_sum, *uploads):
    """Completes a sum, and compares it with that of gradients. Those that have no places yet get them."""
    wanted = spec.empty_sum((), where="the test")
    for upload in uploads:
        wanted.add(upload.gradient)
    places = [place if upload.place is None else upload.place for place, upload in enumerate(uploads)]
    described = [upload.at(place) for place, upload in zip(places, uploads, strict=True)]
    sums.complete(described, InlineReader(server, KEYS.current, described))
    assert round_sum.number == len(uploads)
    assert_same_bits(round_sum, wanted)


def by_worker(*numbers):
    """Returns gradients of workers with these numbers, and a sum by worker that expects three."""
    spec = SPECS["both"]
    sums = PartSums(Server(), spec.empty_sum((), where="the test"), SumOptions(KEYS, 3, by_worker=True))
    return [Upload(k, spec, k, 64).at(number) for k, number in enumerate(numbers)], sums


def test_by_worker_what_is_admitted_is_not_replaced():
    (first, again), sums = by_worker(0, 0)
    sums.announce(first, admitted=True)
    sums.announce(again)
    assert not sums.knows(again.id)


@pytest.mark.parametrize("lease", [0.0, 10.0])
def test_a_stalled_upload_keeps_its_place_while_it_is_needed_or_gives_signs_of_life(clock, lease):
    clock.stop()
    (slow, *others), sums = by_worker(0, 1, 2, 3)
    sums.announce(slow, lease=lease)
    for other in others:
        clock.advance(11)
        sums.skip_stalled()
        assert sums.knows(slow.id), "without it, later ones would be held as well"
        sums.announce(other, lease=1000.0)
        sums.arrive(PartsArrived(other.id, 1))
    sums.arrive(PartsArrived(slow.id, 0))
    for seconds, stays in ((0.4, True), (9, lease > 0), (2, False)):
        clock.advance(seconds)
        sums.skip_stalled()
        assert sums.knows(slow.id) is stays
