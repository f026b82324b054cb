"""Fixtures of the behaviour suite: servers, clients, accumulators, and a look for what a test left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from daemons import Daemon
from leaks import leftovers
from servers import FAKE, NAMES, MissingError, Servers, ServerUnderTest, executable

import redisacc
from redisacc import _parked

# in_place_limit for each way of holding a gradient. Parked ones of tests are small; "in_parts" they count as large.
HOLDINGS = {"in_place": 10**9, "parked": 0, "in_parts": 0}
# Servers that see all three: what differs is where the bytes lie, and not how a server behaves.
ALL_HOLDINGS = (FAKE, "valkey")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("redisacc")
    group.addoption("--servers", default=",".join(NAMES), help="comma-separated: " + ",".join(NAMES))
    group.addoption(
        "--long", action="store_true", default=os.environ.get("REDISACC_LONG") == "1", help="search for longer"
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(_chosen(config)) - set(NAMES)
    if unknown:
        raise pytest.UsageError(f"--servers: unknown {sorted(unknown)}, there are {', '.join(NAMES)}")
    config.addinivalue_line("markers", "servers(*names): run on these of the chosen servers only")
    config.addinivalue_line("markers", "forges: writes foreign keys itself, so don't look for leftovers")


def _chosen(config: pytest.Config) -> list[str]:
    return [name for name in config.getoption("--servers").split(",") if name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_name" not in metafunc.fixturenames:
        return
    names = _chosen(metafunc.config)
    if "real_server" in metafunc.fixturenames:
        names = [name for name in names if name != FAKE]
    for marker in metafunc.definition.iter_markers("servers"):
        names = [name for name in names if name in marker.args]
    if "holding" in metafunc.fixturenames:
        # The fake server can't add in place: both limits come to the same there, which a test of its own shows.
        pairs = [
            (name, holding)
            for name in names
            for holding in HOLDINGS
            if (name != FAKE or holding != "in_place") and (name in ALL_HOLDINGS or holding != "in_parts")
        ]
        metafunc.parametrize(("server_name", "holding"), pairs, ids=["-".join(pair) for pair in pairs])
    else:
        metafunc.parametrize("server_name", names)


@pytest.fixture(scope="session")
def _servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest, server_name: str, _servers: Servers) -> Iterator[ServerUnderTest]:
    """One of the chosen servers, with an empty database. At the end nothing may be in it that has no owner."""
    forges = request.node.get_closest_marker("forges") is not None
    yield from _server(server_name, _servers, look=not forges)


@pytest.fixture
def real_server(server: ServerUnderTest) -> ServerUnderTest:
    """As `server`, but never the fake one: it can be reached from other processes."""
    assert server.real
    return server


def _server(name: str, servers: Servers, *, look: bool) -> Iterator[ServerUnderTest]:
    if name == FAKE:
        under_test = ServerUnderTest(name, None)
    else:
        try:
            under_test = ServerUnderTest(name, servers.get(name))
        except MissingError as error:
            if os.environ.get("CI", "").lower() in ("true", "1") and not error.excused:
                pytest.fail(f"no server {name}: {error}")
            pytest.skip(f"no server {name}: {error}")
        under_test.client().flushall()
    yield under_test
    # Every fixture that opens accumulators stands above this one, and has closed them.
    try:
        if look:
            assert leftovers(under_test.client()) == []
    finally:
        under_test.close()


@pytest.fixture
def client(server: ServerUnderTest) -> redis.Redis:
    """A client of the server, at its empty database."""
    return server.client()


@pytest.fixture
def real_client(real_server: ServerUnderTest, client: redis.Redis) -> redis.Redis:
    """As `client`, but never of the fake server."""
    return client


@pytest.fixture
def holding() -> str:
    """How gradients are held, a key of HOLDINGS. Set by pytest_generate_tests."""
    raise AssertionError("a test that uses `holding` needs a server, too")


class Opener:
    """Opens accumulators of one kind on the test's server and closes them when the test ends."""

    def __init__(self, kind: Callable[..., Any], client: redis.Redis, in_place_limit: int | None) -> None:
        self._kind = kind
        self._client = client
        self._in_place_limit = in_place_limit
        self._opened: list[redisacc.ConditionalAccumulatorBase] = []

    def __call__(self, dtype: Any, shape: Any = None, shared_name: str | None = None, **options: Any) -> Any:
        options.setdefault("redis", self._client)
        if self._in_place_limit is not None:
            options.setdefault("in_place_limit", self._in_place_limit)
        accumulator = self._kind(dtype, shape, shared_name, **options)
        self._opened.append(accumulator)
        return accumulator

    def close(self) -> None:
        for accumulator in self._opened:
            accumulator.close()


def _opener(kind: Callable[..., Any], client: redis.Redis, in_place_limit: int | None) -> Iterator[Opener]:
    opener = Opener(kind, client, in_place_limit)
    yield opener
    opener.close()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process park every gradient in parts, as if it were large."""
    monkeypatch.setattr(_parked, "SMALL_BYTES", 0)


@pytest.fixture
def held(request: pytest.FixtureRequest, holding: str) -> str:
    """As `holding`, and in effect."""
    if holding == "in_parts":
        request.getfixturevalue("in_parts")
    return holding


@pytest.fixture
def make_dense(client: redis.Redis, held: str) -> Iterator[Opener]:
    """Opens dense accumulators whose gradients are all held in the way of `holding`."""
    yield from _opener(redisacc.ConditionalAccumulator, client, HOLDINGS[held])


@pytest.fixture
def make_sparse(client: redis.Redis, held: str) -> Iterator[Opener]:
    """Opens sparse accumulators whose gradients are all held in the way of `holding`."""
    yield from _opener(redisacc.SparseConditionalAccumulator, client, HOLDINGS[held])


@pytest.fixture
def open_dense(client: redis.Redis) -> Iterator[Opener]:
    """Opens dense accumulators as they come, for tests that don't care how gradients are held."""
    yield from _opener(redisacc.ConditionalAccumulator, client, None)


@pytest.fixture
def open_sparse(client: redis.Redis) -> Iterator[Opener]:
    """Opens sparse accumulators as they come."""
    yield from _opener(redisacc.SparseConditionalAccumulator, client, None)


# A listener outlives its last take by some seconds, in case there is another. Each test has clients of its own, so one
# that is much older than that is never going to end.
LISTENER_AGE = 30.0
_listeners_seen: weakref.WeakKeyDictionary[threading.Thread, float] = weakref.WeakKeyDictionary()


@pytest.fixture(autouse=True)
def _the_machine_may_stand_still() -> Iterator[None]:
    """A busy one does, for a second or two: that alone must not let a take give up, or leave something behind."""
    # Not the test's own monkeypatch, which it may undo.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redisacc._taking.LAST_LOOK", 5.0)
        patch.setattr("redisacc._private.RELEASE_PATIENCE", 30.0)
        yield


@pytest.fixture(autouse=True)
def _threads_checked() -> Iterator[None]:
    """No thread outlives the test that started it, but for one that renews leases and listeners, for a while."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while True:
        alive = threading.enumerate()
        ours = [thread for thread in alive if thread.name.startswith("redisacc-")]
        left = [thread for thread in alive if thread not in before and thread not in ours]
        # A second one may be about to end.
        left += [thread for thread in ours if thread.name == "redisacc-leases"][1:]
        if not left:
            break
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        gc.collect()
        time.sleep(0.01)
    now = time.monotonic()
    for thread in ours:
        if thread.name == "redisacc-events":
            assert now - _listeners_seen.setdefault(thread, now) < LISTENER_AGE, f"a listener that never ends: {thread}"


@pytest.fixture
def background() -> Iterator[Callable[..., Background]]:
    """Starts functions in threads; the test fails if one of them outlives it."""
    started: list[Background] = []

    def start(function: Callable[..., Any], *args: Any, **options: Any) -> Background:
        one = Background(function, args, options)
        started.append(one)
        return one

    yield start
    for one in started:
        one.join()


class Background:
    """A call in a thread of its own, and what became of it."""

    def __init__(self, function: Callable[..., Any], args: Any, options: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = function(*args, **options)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float = 20) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call still blocks"

    def result(self, timeout: float = 20) -> Any:
        """The call's value, or its exception, once it has ended."""
        self.join(timeout)
        if self._error is not None:
            raise self._error
        return self._value


def _until(condition: Callable[[], Any], timeout: float = 20) -> Any:
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for a condition to come true and returns its first true value."""
    return _until


@pytest.fixture
def daemon(server_name: str, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons of one of the chosen servers, each in a folder of its own; they are gone when the test ends."""
    if server_name == FAKE:
        pytest.skip("nothing that could be killed")
    try:
        program = executable(server_name)
    except MissingError as error:
        if os.environ.get("CI", "").lower() in ("true", "1") and not error.excused:
            pytest.fail(f"no server {server_name}: {error}")
        pytest.skip(f"no server {server_name}: {error}")
    made: list[Daemon] = []

    def make(*options: str, **more: Any) -> Daemon:
        made.append(Daemon(program, tmp_path / f"daemon-{len(made)}", *options, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens accumulators that are closed when the test ends."""
    handles: list[redisacc.ConditionalAccumulatorBase] = []

    def open_one(kind: str, *args: Any, **options: Any) -> Any:
        make = redisacc.SparseConditionalAccumulator if kind == "sparse" else redisacc.ConditionalAccumulator
        handles.append(make(*args, **options))
        return handles[-1]

    yield open_one
    for handle in handles:
        handle.close()
