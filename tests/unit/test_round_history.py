"""The times of rounds, from events that are heard at given moments; and what a server says of itself."""

from support.rows import every_row

from redisacc._protocol.lifecycle.events import Event
from redisacc._wire.replies import parse_info
from redisacc.tools.monitoring.rounds import ROUNDS, Histogram, RoundHistory


def heard(*lines):
    """Returns the history of (moment, event) pairs; an event None is a gap, and "published" one of parameters."""
    history = RoundHistory()
    for at, line in lines:
        if line == "published":
            history.hear_published(at)
        else:
            history.hear(Event.parse(line), at)
    return history


def whole_round(start, step=0):
    """Returns a round of two gradients of 100 bytes whose chief waits: 1 s alone, 4 s for gradients, 2 s to publish."""
    return [
        (start, f"waiting step={step} count=0 num_required=2 taker=chief"),
        (start + 1, f"applied step={step} count=1 bytes=100 worker=a"),
        (start + 4, f"applied step={step} count=2 bytes=100 staleness=3 worker=b c"),
        (start + 5, f"taken step={step + 1} count=0 taken=2 taker=chief"),
        (start + 7, "published"),
    ]


def values(histogram):
    """Returns how many values a histogram has, and their sum."""
    return sum(histogram.counts), histogram.total


def test_the_times_of_a_round():
    found = heard(*whole_round(100), *whole_round(107, 1))
    first, second = found.rounds
    assert (first.step, first.num_accumulated, first.nbytes, first.taker) == (0, 2, 200, "chief")
    assert (first.began, first.first, first.last, first.taken, first.published) == (None, 101, 104, 105, 107)
    assert (second.began, second.first, second.last, second.taken, second.published) == (107, 108, 111, 112, 114)
    assert (found.filling.began, found.filling.first, found.filling.last) == (114, None, None)
    assert found.bytes_per_second(114.5) == 100 / 5
    assert values(found.histograms["round_seconds"]) == (1, 7)
    assert values(found.histograms["gathering_seconds"]) == (2, 6)
    assert values(found.histograms["take_wait_seconds"]) == (2, 10)
    assert values(found.histograms["staleness_steps"]) == (2, 6)
    assert values(found.histograms["round_bytes"]) == (2, 400)


def test_the_round_that_is_filling():
    found = heard(*whole_round(100), (108, "applied step=1 count=1 bytes=7 worker=a"))
    assert (found.filling.began, found.filling.first, found.filling.last) == (107, 108, 108)


def test_parameters_that_come_after_the_next_gradient_did_not_hold_it_up():
    events = whole_round(100)[:-1]
    found = heard(*events, (106, "applied step=1 count=1 bytes=7 worker=a"), (107, "published"))
    assert (found.rounds[0].published, found.filling.began, found.filling.first) == (107, 105, 106)


def test_what_was_not_heard_is_left_out():
    """The connection was lost between the two gradients of a round: nothing about it is certain but its end."""
    first, *rest = whole_round(100)
    found = heard(first, rest[0], (102, None), *rest[1:])
    (only,) = found.rounds
    assert (only.nbytes, only.began, only.first, only.last, only.taken) == (None, None, None, 104, 105)
    assert (
        values(found.histograms["round_bytes"])
        == values(found.histograms["gathering_seconds"])
        == values(found.histograms["take_wait_seconds"])
        == (0, 0)
    )
    assert values(found.histograms["round_seconds"]) == (0, 0)


def test_a_take_that_need_not_wait_has_waited_for_no_time():
    again = [(moment, line) for moment, line in whole_round(110, 1) if not str(line).startswith("waiting")]
    assert values(heard(*whole_round(100), *again).histograms["take_wait_seconds"]) == (2, 5)


def test_the_waits_of_takers_of_whom_one_has_left_are_unknown():
    waiting = [(90, "waiting step=0 count=0 num_required=2 taker=other"), (95, "left")]
    found = heard(*waiting, *whole_round(100)[1:])
    assert values(found.histograms["take_wait_seconds"]) == (0, 0)


def test_only_the_latest_rounds_are_remembered():
    history = heard(*(event for n in range(ROUNDS + 5) for event in whole_round(10 * n, n)))
    assert [of.step for of in history.rounds] == list(range(5, ROUNDS + 5))


@every_row(
    "line",
    [
        "applied step=1 count=1 bytes=-5 worker=x",
        "applied step=1 count=1 bytes=9999999999999999 staleness=5000 worker=x",
        "applied count=1 bytes=x worker=x",
        "taken step=1 count=0 taken=x taker=x",
        "taken count=0",
        "waiting step=1 count=1 num_required=1",
        "",
        "\x1b[2J",
    ],
)
def test_what_anybody_may_publish_is_not_believed(line):
    found = heard((1, line), *whole_round(100))
    assert found.rounds[-1].nbytes == 200
    assert found.bytes_per_second(105.5) == 200 / 5
    assert values(found.histograms["round_bytes"]) == (1, 200)
    assert values(found.histograms["staleness_steps"]) == (1, 3)


def test_a_histogram_counts_a_value_that_equals_a_bound_under_it():
    histogram = Histogram((1, 2))
    for value in (1, 1.5, 2, 3):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([1, 2, 1], 7.5)


def test_lines_of_info_that_are_not_numbers():
    assert parse_info(b"# Memory\r\nused_memory:12\r\nmaxmemory:\xff\r\nx\r\n") == {
        "used_memory": "12",
        "maxmemory": "\\xff",
    }
    assert parse_info(None) == {}
