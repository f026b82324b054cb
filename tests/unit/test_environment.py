"""The place of a process in a run, as its environment says it."""

import pytest
from support.rows import every_row

from redisacc import Chief
from redisacc._handles.environment import Place, place
from redisacc.errors import InvalidArgumentError

CHIEF = Place("chief", None, 3, "a-1_B")
WORKER = Place("worker", 2, 3, "x" * 64, "a-1_B")


@every_row("expected", [CHIEF, WORKER, Place("worker", 0), Place(), Place(workers=1_000_000)])
def test_a_place_travels_through_the_environment(expected):
    assert place(expected.added_to({})) == expected


def test_the_environment_of_another_place_is_replaced():
    inside = CHIEF.added_to(WORKER.added_to({"HOME": "/"}))
    assert inside == {"HOME": "/", "REDISACC_ROLE": "chief", "REDISACC_WORKERS": "3", "REDISACC_RUN_ID": "a-1_B"}


def test_the_variables_of_torchrun_are_those_of_a_worker():
    inside = WORKER.added_to({"RANK": "7", "LOCAL_RANK": "6"}, (0, 2))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [inside.get(name) for name in names] == ["2", "0", "3", "2"]
    assert not CHIEF.added_to(inside).keys() & set(names)
    assert "WORLD_SIZE" not in Place("worker", 0).added_to(inside, (0, 1))


@every_row(
    "environment, expected",
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Place(None, 1, 4)),
        ({"RANK": "1"}, Place(None, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4", "REDISACC_WORKERS": "3"}, Place(None, 1, 3)),
        ({"WORLD_SIZE": "4"}, Place()),
        ({"RANK": "1", "WORLD_SIZE": "4", "REDISACC_WORKER_NUMBER": "2"}, Place(None, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", "REDISACC_ROLE": "chief"}, Place("chief")),
    ],
)
def test_a_process_of_torchrun_knows_its_place(environment, expected):
    assert place(environment) == expected


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    for name, value in WORKER.added_to({}).items():
        monkeypatch.setenv(name, value)
    assert place() == WORKER


def test_an_empty_variable_is_not_set():
    names = WORKER.added_to({})
    assert place(dict.fromkeys(names, "")) == Place()


def test_what_people_call_it():
    assert [str(of) for of in (CHIEF, WORKER, Place("worker"))] == ["chief", "worker 2", "worker"]


@every_row(
    "name, value, expected",
    [
        ("REDISACC_ROLE", "Chief", "must be chief or worker, not 'Chief'"),
        ("RANK", "one", "must be a whole number from 0 to 999999, not "),
        ("REDISACC_ROLE", "w\x1b[2J" * 1000, "must be chief or worker"),
        *(
            ("REDISACC_WORKER_NUMBER", value, "must be a whole number from 0 to 999999, not ")
            for value in ("-1", "1000000", "1.0", "1_0", " 1", "+1", "٣", "9" * 5000, "one")
        ),
        *(("REDISACC_WORKERS", value, "must be a whole number from 1 to 1000000, not ") for value in ("0", "1000001")),
        *(
            (name, value, "must be 1 to 64 ASCII letters, digits, hyphens or underscores, not ")
            for name in ("REDISACC_RUN_ID", "REDISACC_CHIEF_RUN_ID")
            for value in ("a b", "a:b", "{", "x" * 65, "é", "a\n")
        ),
    ],
)
def test_what_a_variable_cannot_hold(name, value, expected):
    with pytest.raises(InvalidArgumentError) as raised:
        place({name: value})
    message = str(raised.value)
    assert message.startswith(f"the environment variable {name} ")
    assert expected in message
    assert message.isprintable()
    assert len(message) < 300


def test_a_chief_without_a_number_of_workers_names_the_variable(monkeypatch):
    monkeypatch.delenv("REDISACC_WORKERS", raising=False)
    said = "workers is missing. A number is in the environment variable REDISACC_WORKERS"
    with pytest.raises(InvalidArgumentError, match=said):
        Chief("train", {"w": [0.0]})


def test_variables_that_contradict_each_other():
    with pytest.raises(InvalidArgumentError, match="only workers have numbers"):
        place({"REDISACC_ROLE": "chief", "REDISACC_WORKER_NUMBER": "0"})
    with pytest.raises(InvalidArgumentError, match="the last one has the number 2"):
        place({"REDISACC_ROLE": "worker", "REDISACC_WORKER_NUMBER": "3", "REDISACC_WORKERS": "3"})
