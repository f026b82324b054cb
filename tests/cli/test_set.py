"""The command `set`."""

from __future__ import annotations

import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")

UNSET = {"num_required": None, "up_to": None, "grace": None}


def test_set(cli, cli_json, accumulator):
    first = {"num_required": 3, "up_to": 4, "grace": 0.5}
    assert cli_json("set", "w", "n=3", "up_to=4", "grace=0.5") == {"before": UNSET, "settings": first}
    found = cli("set", "w", "n=2")
    assert (found.exit_code, found.stdout) == (0, "w: n=2 up_to=4 grace=0.5 (before: n=3 up_to=4 grace=0.5)\n")
    assert "settings     n=2 up_to=4 grace=0.5\n" in cli("show", "w").stdout
    assert cli_json("show", "w")["settings"] == {**first, "num_required": 2}
    found = cli("set", accumulator.accumulator_ref, "up_to=", "grace=none")
    assert found.stdout == "redisacc:{w}: n=2 (before: n=2 up_to=4 grace=0.5)\n"
    assert cli("set", "w", "n=none").stdout == "w: none (before: n=2)\n"
    assert accumulator.settings() == redisacc.Settings()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'SETTING...'"),
        (("n",), "'n' is none of n=VALUE, up_to=VALUE, grace=VALUE"),
        (("3",), "'3' is none of"),
        (("num=3",), "'num=3' is none of"),
        (("n=0",), "0 is not in the range x>=1"),
        (("n=1.5",), "'1.5' is not a valid integer"),
        (("n=3", "n=4"), "n is given twice"),
        (("grace=nan",), "nan is not a number of seconds"),
        (("grace=-1",), "-1.0 is not in the range"),
        (("grace=604801",), "604801.0 is not in the range"),
        (("n=99999999999999999999",), "num_required must be"),
        (("up_to=4",), "up_to must be at least num_required"),
        (("n=5", "up_to=4", "grace=1"), "up_to must be at least num_required"),
    ],
)
def test_what_is_no_setting(cli, accumulator, words, message):
    found = cli("set", "w", *words)
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.split())
    assert accumulator.settings() == redisacc.Settings()


def test_take_waits_for_what_is_set(cli, cli_json, accumulator, tmp_path):
    accumulator.apply_grad([1, 2, 3])
    output = ("-o", tmp_path / "g.npy", "--timeout", 0)
    found = cli("take", "w", *output)
    assert found.exit_code == 2
    assert "num_required is missing" in found.stderr
    cli("set", "w", "n=2")
    assert cli("take", "w", *output).exit_code == 4
    cli("set", "w", "n=1")
    assert cli_json("take", "w", *output)["num_accumulated"] == 1
