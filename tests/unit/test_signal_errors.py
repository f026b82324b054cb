"""What a signal handler raises is told from the errors of the code that it interrupts."""

import functools
import signal
import socket
import ssl
import threading

import numpy as np
import pytest
import redis
from support.rows import every_row

import redisacc
from redisacc._arrays import validation
from redisacc._format.stored_text import parsed
from redisacc._interrupts import interrupt_in, suppressed
from redisacc._wire.clients import translated
from redisacc._wire.faults import BrokenError


class Handler:
    """Handlers of all kinds. Each raises the error of the object."""

    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        raise self.error

    def method(self, *_):
        raise self.error

    def forgetful(self, number, frame):
        # As some styles have it.
        del number, frame
        raise self.error

    def deep(self, number, frame):
        self.forgetful(number, frame)

    def once(self, number, frame):
        signal.signal(number, signal.SIG_IGN)
        raise self.error

    def partial(self, keyword, number, frame):
        raise self.error


KINDS = {
    "callable": lambda handler: handler,
    "method": lambda handler: handler.method,
    "forgetful": lambda handler: handler.forgetful,
    "deep": lambda handler: handler.deep,
    "once": lambda handler: handler.once,
    "function": lambda handler: lambda number, frame: handler.method(),
    "partial": lambda handler: functools.partial(handler.partial, 1),
    "forgetful partial": lambda handler: functools.partial(Handler.forgetful, handler),
}
ERRORS = (TimeoutError, ConnectionResetError, OSError, ValueError)


@pytest.fixture
def handled():
    """Returns a function that installs a handler for SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def raised_by(function):
    """Returns what a function raises."""
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raises nothing")


def interrupted():
    signal.raise_signal(signal.SIGUSR1)


@every_row("kind", ERRORS)
@every_row("how", KINDS)
def test_what_a_handler_raises_is_recognized(handled, how, kind):
    error = kind("raised")
    handled(KINDS[how](Handler(error)))
    assert interrupt_in(raised_by(interrupted)) is error


def refused():
    socket.create_connection(("localhost", 1), timeout=3)


def silent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.001)
        ours.recv(1)


def silent_tls():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.001)
        ssl.create_default_context().wrap_socket(ours, server_hostname="localhost")


def unreachable():
    redis.Redis(port=1, retry=None).ping()


@every_row("function", [refused, silent, silent_tls, unreachable])
def test_what_a_socket_raises_is_not_taken_for_it(handled, function):
    handled(Handler(OSError()))
    assert interrupt_in(raised_by(function)) is None


@every_row("function", [refused, silent])
def test_nor_is_it_while_what_a_handler_raised_is_being_handled(handled, function):
    handled(Handler(TimeoutError()))
    try:
        interrupted()
    except TimeoutError:
        failure = raised_by(function)
    assert failure.__context__ is not None
    assert interrupt_in(failure) is None


@every_row("kind", ERRORS)
def test_an_error_that_a_library_has_made_of_it_gives_it_back(handled, kind):
    error = kind("raised")
    handled(Handler(error))

    def library(*, how):
        try:
            interrupted()
        except kind as caught:
            if how == "context":
                raise redis.ConnectionError("interrupted")  # noqa: B904 - as redis-py does
            raise redis.ConnectionError("interrupted") from (caught if how == "cause" else None)

    for how in ("context", "cause", "none"):
        assert interrupt_in(raised_by(functools.partial(library, how=how))) is error
        with pytest.raises(kind) as found, translated():
            library(how=how)
        assert found.value is error


def test_it_is_neither_translated_nor_suppressed(handled):
    error = OSError("raised")
    handled(Handler(error))
    for block in (translated(), suppressed(OSError)):
        with pytest.raises(OSError, match="raised") as found, block:
            interrupted()
        assert found.value is error
    with pytest.raises(BrokenError), translated():
        refused()
    with suppressed(OSError):
        refused()
    with pytest.raises(KeyError), suppressed(OSError):
        {}["missing"]


@every_row("kind", ERRORS)
def test_an_array_that_is_interrupted_while_it_is_read_is_not_called_unreadable(handled, kind):
    class Slow:
        def __array__(self, dtype=None, copy=None):
            interrupted()
            return np.zeros(2, np.float32)

    error = kind("raised")
    handled(Handler(error))
    assert raised_by(lambda: validation.array(Slow(), "gradient")) is error


@every_row("kind", ERRORS)
@every_row("scheme", ["redis", "rediss"])
def test_the_making_of_a_connection_can_be_interrupted(handled, scheme, kind):
    """The client's library turns what the handler raises into errors of its own."""
    error = kind("raised")
    handled(Handler(error))
    main = threading.main_thread().ident
    with socket.create_server(("localhost", 0)) as peer:

        def interrupt():
            connection, _ = peer.accept()
            with connection:
                # The first bytes of the handshake, which are never answered.
                connection.recv(1)
                signal.pthread_kill(main, signal.SIGUSR1)
                connection.recv(10_000)
                connection.recv(1)

        thread = threading.Thread(target=interrupt)
        thread.start()
        url = f"{scheme}://:password@localhost:{peer.getsockname()[1]}"
        assert raised_by(lambda: redisacc.ConditionalAccumulator("float32", [2], redis=url)) is error
        thread.join()


@every_row("error", ERRORS)
def test_an_interrupt_while_stored_text_is_read_is_no_corrupt_data(handled, error):
    def parse(_):
        signal.raise_signal(signal.SIGUSR1)

    handled(Handler(error()))
    with pytest.raises(error):
        parsed("redisacc:{w}", "step", b"1", parse)
