"""The command `set`."""

import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")

UNSET = {"least": None, "most": None, "grace": None, "min_weight": None}


def test_set(cli, cli_json, accumulator):
    first = {**UNSET, "least": 3, "most": 4, "grace": 0.5}
    assert cli_json("set", "w", "least=3", "most=4", "grace=0.5") == {"before": UNSET, "quorum": first}
    found = cli("set", "w", "least=2")
    assert (found.exit_code, found.stdout) == (0, "w: least=2 most=4 grace=0.5 (before: least=3 most=4 grace=0.5)\n")
    assert "quorum       least=2 most=4 grace=0.5\n" in cli("show", "w").stdout
    assert cli_json("show", "w")["quorum"] == {**first, "least": 2}
    found = cli("set", accumulator.accumulator_ref, "most=", "grace=none")
    assert found.stdout == "redisacc:{w}: least=2 (before: least=2 most=4 grace=0.5)\n"
    assert cli("set", "w", "least=none").stdout == "w: none (before: least=2)\n"
    assert accumulator.quorum() == redisacc.Quorum()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give numbers of the quorum, such as least=3; or step=N alone; or --forget WORKER alone"),
        (("least",), "'least' is none of least=VALUE, most=VALUE, grace=VALUE, step=VALUE"),
        (("3",), "'3' is none of"),
        (("num=3",), "'num=3' is none of"),
        (("least=0",), "0 is not in the range x>=1"),
        (("least=1.5",), "'1.5' is not a valid integer"),
        (("least=3", "least=4"), "least is given twice"),
        (("grace=nan",), "nan is not a number of seconds"),
        (("grace=-1",), "-1.0 is not in the range"),
        (("grace=604801",), "604801.0 is not in the range"),
        (("least=99999999999999999999",), "least must be"),
        (("most=4",), "most must be at least least"),
        (("least=5", "most=4", "grace=1"), "most must be at least least"),
    ],
)
def test_what_is_no_number(cli, accumulator, words, message):
    found = cli("set", "w", *words)
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.split())
    assert accumulator.quorum() == redisacc.Quorum()


def test_set_step(cli, cli_json, accumulator):
    assert cli_json("set", "w", f"step={2**53 + 1}") == {"before": 0, "global_step": 2**53 + 1}
    found = cli("set", "w", "step=5")
    assert (found.exit_code, accumulator.global_step()) == (2, 2**53 + 1)
    found = cli("set", "w", "step=-5", "--yes")
    assert found.exit_code == 0
    assert "the global step was lowered to -5" in found.stderr
    assert accumulator.global_step() == -5
    assert cli("set", "w", f"step={2**63}").exit_code == 2


def test_it_asks_before_it_passes_over_a_round(cli, cli_json, accumulator):
    accumulator.apply_grad([1, 2, 3])
    found = cli("set", "w", "step=7")
    assert (found.exit_code, accumulator.global_step()) == (2, 0)
    assert "this needs a confirmation" in found.stderr
    assert cli("set", "w", "step=0").exit_code == 0
    assert cli_json("set", "w", "step=7", "--yes") == {"before": 0, "global_step": 7}
    assert accumulator.num_accumulated() == 1
