"""Which buffered gradients are compacted first."""

from types import SimpleNamespace

from support.rows import every_row

from redisacc._protocol.applying.gradient_writer import _cheapest, _oldest

MIB = 2**20


def gradients(*sizes):
    return [SimpleNamespace(nbytes=size * MIB, lengths=(size * MIB,)) for size in sizes]


@every_row(
    "sizes, first, last",
    [
        # All of them have room in one fold, which may have 128 MiB.
        ((1, 2, 3), 0, 3),
        # A large sum at the front is not moved for each new gradient.
        ((127, 1, 1), 0, 2),
        ((128, 1, 1), 1, 3),
        ((200, 1), 0, 1),
        # The longest run, and of equally long ones the oldest.
        ((100, 100, 30, 30, 30), 2, 5),
        ((100, 100, 20, 1, 90), 1, 4),
        # At most 64, whatever their size.
        ((1,) * 70, 0, 64),
    ],
)
def test_the_cheapest_are_the_longest_run_that_fits(sizes, first, last):
    held = gradients(*sizes)
    assert _cheapest(held) == held[first:last]


@every_row("sizes, number", [((1,), 1), ((200, 200, 1), 2), ((128, 1, 1), 2), ((100, 20, 8, 1), 3), ((1,) * 70, 64)])
def test_the_oldest_are_two_at_least_and_no_more_than_fit(sizes, number):
    held = gradients(*sizes)
    assert _oldest(held) == held[:number]
