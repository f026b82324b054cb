"""The notes of metrics in the entry of a worker, and the means that are made of them."""

import math

from support.rows import every_row

from redisacc._arrays.metrics import mean_metrics, metric_notes


@every_row(
    "note",
    [
        b"",
        b"=",
        b"loss",
        b"loss=1",
        b"loss=1*0",
        b"loss=1*-1",
        b"loss=1*inf",
        b"loss=--*1",
        b"lo\x1bss=1*1",
        b"a=1*1e999",
    ],
)
def test_whatever_is_not_a_note_is_left_out(note):
    assert mean_metrics([note, b"seen=2.0*1.0"]) == {"seen": 2.0}


def test_a_digest_that_two_gradients_have():
    notes = [f"~{digest:016x}".encode() for digest in (3, 5, 4, 5, 5, 3)]
    assert mean_metrics(notes).digest == f"{5:016x}"
    assert mean_metrics([*notes[:3], b"~5", b"~" + b"x" * 16]).digest == ""
    mean = mean_metrics([b"=[1", b"={}", b"=2"])
    assert (mean, mean.kept) == ({}, "{}")


def test_numbers_arrive_with_all_bits():
    for value in (0.1, 1e-300, -1.7976931348623157e308, 5e-324, float("inf"), -0.0):
        (mean,) = mean_metrics(metric_notes({"x": value}, 1.0).encode().split()).values()
        assert (mean, math.copysign(1, mean)) == (value, math.copysign(1, value)) or mean == value


@every_row("rate", [0.1, 1e-3 / 3, 0.7])
@every_row("weights", [(1.0, 1.0, 1.0), (0.3, 0.7, 0.1)])
def test_the_mean_of_equal_metrics_is_that_number(rate, weights):
    notes = [metric_notes({"lr": rate}, weight).encode() for weight in weights]
    assert mean_metrics(notes) == {"lr": rate}
