"""Which errors would come again in a process that is started again."""

import pytest
from support.rows import every_row

import redisacc
from redisacc._handles import exit_code
from redisacc._handles.environment import RESTARTED


@pytest.fixture(autouse=True)
def _is_at_the_beginning(monkeypatch):
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: False)
    monkeypatch.delenv(RESTARTED, raising=False)


@every_row(
    "error",
    [
        redisacc.InvalidArgumentError("x"),
        NameError("x"),
        ImportError("x"),
        NotImplementedError("x"),
    ],
)
def test_errors_of_programs_come_again(error, monkeypatch):
    assert exit_code.comes_again(error)
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)
    assert exit_code.comes_again(error)


@pytest.mark.parametrize("error", [TypeError("x"), AttributeError("x"), AssertionError("x")])
def test_errors_that_data_may_cause_come_again_before_the_second_step(error, monkeypatch):
    assert exit_code.comes_again(error)
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)
    assert not exit_code.comes_again(error)


def test_an_error_in_the_first_call_of_a_function_comes_again_in_any_step(monkeypatch):
    monkeypatch.setattr(exit_code._has_advanced, "is_set", lambda: True)

    def fail(error):
        if error is not None:
            raise error

    for fails_first in (True, False):
        noting = exit_code.noting_its_first_call(fail)
        if not fails_first:
            noting(None)
        error = TypeError("x")
        with pytest.raises(TypeError):
            noting(error)
        assert exit_code.comes_again(error) is fails_first


@every_row(
    "error",
    [
        redisacc.ServerUnavailableError("x"),
        redisacc.ConflictError("x"),
        redisacc.NotFoundError("x"),
        redisacc.RedisAccError("x"),
        ConnectionResetError("x"),
        FileNotFoundError("x"),
        MemoryError("x"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_other_errors_may_pass(error):
    assert not exit_code.comes_again(error)


@every_row("restarted, comes_again", [("0", True), ("1", False), (None, False)])
def test_errors_of_data_may_pass_unless_they_end_the_first_process(restarted, comes_again, monkeypatch):
    if restarted is not None:
        monkeypatch.setenv(RESTARTED, restarted)
    for error in (RuntimeError("CUDA out of memory"), KeyError("x"), ValueError("x"), ZeroDivisionError("x")):
        assert exit_code.comes_again(error) is comes_again
    assert not exit_code.comes_again(redisacc.RedisAccError("x"))
