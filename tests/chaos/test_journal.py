"""The comparison of journals finds every kind of loss and repetition."""

from types import SimpleNamespace

from chaos.journal import Tale
from support.rows import every_row

# Two workers and two takers. Round 0 has the gradients 10 and 11, round 1 has 12 and 20.
WORKER = "begin 10 13\napplied 10 0\napplied 11 0\napplied 12 1\ndropped 13\nend\n"
OTHER_WORKER = "begin 20 23\napplied 20 1\n"
TAKER = "round 0 2 10 11\n"
GRAD_TAKER = "taking\nround ? 2 12 20\nkept\n"
TOTALS = {"applied": 4, "takes": 2, "global_step": 2}


def problems_of(tmp_path, *journals, **totals):
    tale = Tale()
    for number, text in enumerate(journals):
        path = tmp_path / f"{number}.journal"
        path.write_text(text)
        tale.read(path)
    tale.check(SimpleNamespace(**TOTALS | totals))
    return tale.problems


def test_a_run_without_a_loss_has_no_problem(tmp_path):
    assert problems_of(tmp_path, WORKER, OTHER_WORKER, TAKER, GRAD_TAKER) == []


def test_a_round_may_be_handed_out_again_if_it_is_the_same(tmp_path):
    assert problems_of(tmp_path, WORKER, OTHER_WORKER, TAKER, TAKER, GRAD_TAKER) == []
    assert "was another" in problems_of(tmp_path, WORKER, OTHER_WORKER, TAKER, "round 0 1 10\n", GRAD_TAKER)[0]


def test_a_round_may_lose_what_nobody_was_promised(tmp_path):
    """Worker 30 was not told that its gradient was confirmed."""
    unconfirmed, without = "begin 30 30\nunconfirmed\n", "part\nlost 0 1\nround 0 2 10 11\n"
    workers = WORKER, OTHER_WORKER, unconfirmed
    assert problems_of(tmp_path, *workers, without, GRAD_TAKER, applied=5) == []
    whole = "round 0 3 10 11 30\n"
    # Parts of it were lost before it was handed out again; both journals may come first.
    for journals in ((whole, without), (without, whole)):
        assert problems_of(tmp_path, *workers, *journals, GRAD_TAKER, applied=5) == []
    assert "4 to 4 were delivered" in problems_of(tmp_path, *workers, TAKER, GRAD_TAKER, applied=5)[0]
    promised = "part\nlost 0 1\nround 0 2 10 30\n"
    assert "gradient 11, which was counted at step 0, is lost" in "\n".join(
        problems_of(tmp_path, *workers, promised, GRAD_TAKER, applied=5)
    )


def test_only_a_killed_take_grad_excuses_a_missing_round(tmp_path):
    assert problems_of(tmp_path, WORKER, OTHER_WORKER, TAKER, "taking\n") == []
    found = problems_of(tmp_path, WORKER, OTHER_WORKER, TAKER, "taking\nkept\n")
    assert "[1], although only 0 calls of take_grad were killed" in found[0]


@every_row(
    "taker, problem",
    [
        ("round 0 2 10 11\nround 1 1 12\n", "gradient 20, which was counted at step 1, is lost"),
        ("round 0 2 10 11\nround 1 2 12 10\n", "gradient 10 is in the rounds 0 and 1"),
        ("round 0 2 10 12\nround 1 2 11 20\n", "gradient 11 is in round 1, not 0"),
        ("round 0 3 10 11 13\nround 1 2 12 20\n", "gradient 13 is in a round, but was dropped"),
        ("round 0 3 10 11 14\nround 1 2 12 20\n", "gradient 14 is in a round, but was never sent"),
        ("round 0 2 10 11 21\nround 1 2 12 20\n", "round 0 of 2 holds 3 gradients"),
        ("round 0 2 10 11\nround 1 2 12 20\nround 2 1 21\n", "although only 0 calls"),
    ],
)
def test_each_problem_is_found(tmp_path, taker, problem):
    assert problem in "\n".join(problems_of(tmp_path, WORKER, OTHER_WORKER, taker))


def test_the_servers_totals_are_compared(tmp_path):
    journals = WORKER, OTHER_WORKER, TAKER, GRAD_TAKER
    assert problems_of(tmp_path, *journals, applied=5) == ["the server counts 5 gradients, and 4 to 4 were delivered"]
    assert problems_of(tmp_path, *journals, takes=3) == ["the server counts 3 rounds at step 2"]
