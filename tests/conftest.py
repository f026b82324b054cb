"""Fixtures of all tests: servers, clients and accumulators. After each test, a check for keys and threads left behind.

| fixture | what it is |
| --- | --- |
| `server`, `client` | a server with an empty database, and a client of it; one test runs on several servers |
| `real_server`, `real_client` | the same, but never the fake server: other processes can reach it |
| `daemon(*options)` | makes a server of the test's own, which the test may configure, kill and start again |
| `accumulator_client` | the client that opens the accumulators; `--clients` makes it another kind than `client` |
| `everything` | whether the test tries everything it can, as in `make test-rest`, or less, as in `make test` |
| `storage` | how: `in_place`, `buffered_inline`, `buffered_parts`, in three `partitions`, or `encoded` |
| `open_dense_stored`, `open_sparse_stored` | opens ones that store gradients the way of `storage` |
| `open_dense`, `open_sparse`, `open_tree` | opens ones with the usual limits, if storage plays no role |
| `open_accumulator(kind, ...)` | opens accumulators on any server, mostly one of `daemon` |
| `open_parameters(name, ...)` | opens parameters; `redis=` names another client; behaviour tests also partitions |
| `background(function, ...)` | runs a function in a thread; the test fails if the thread outlives it |
| `fork(work)` | forks a process, which stops at each value that ``work`` yields; see support/child_processes.py |
| `until(condition)` | waits for a condition and returns its first true value |
| `durations(opening=0.3)` | changes how long the library waits for something |
| `proxy` | a proxy before the server: faults, and `proxy.before("take", action)`; open handles at `proxy.where` |
| `outages` | `outages.begin_after(number)`: no server after so many requests, until a process says that it waits |
| `full_disk()` | in this block, no file of this process becomes larger than 128 KiB |
| `clock` | moves the time of the library and the server: `clock.advance(10.0)`; processes with `clock.env` follow |
| `nobody_is_late` | keeps workers from being late in this process, however slow the machine is |

Everything that a fixture opens is closed when the test ends. Which servers a test runs on, and which tests `make test`
leaves to `make test-rest`, is in support/selection.py.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import resource
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import selection
from support.child_processes import Child
from support.daemons import Daemon
from support.driven import DrivenClient
from support.leaks import leftovers
from support.moved_clock import MovedClock
from support.outages import Outages
from support.proxy import ClusterProxy, proxy_before_server
from support.servers import CLUSTER, FAKE, Servers, ServerUnderTest, executable
from support.until import until
from support.warm_python import close_forker

import redisacc
from redisacc._clock import durations

# Clients of Redis read their own version from a file for every connection, which takes longer than connecting.
importlib.metadata.version = functools.cache(importlib.metadata.version)
# The tables of tests/faults make assertions as well.
pytest.register_assert_rewrite("operations", "faults")

# A machine that stands still would fail a test at random. In a first run, without compiled files and without the
# examples of earlier runs, the first examples are the slowest.
settings.register_profile("tests", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_addoption(parser):
    selection.add_options(parser)


def pytest_configure(config):
    # A shell starts a background job with Ctrl-C ignored, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # So does nohup with the signal of a terminal that is closed.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    selection.configure(config)
    # Collecting the tests creates a million objects, and none of them is garbage.
    gc.disable()


def pytest_generate_tests(metafunc):
    selection.parametrize_server(metafunc)
    selection.parametrize_client(metafunc)
    selection.parametrize_partitions(metafunc)


def pytest_collection_modifyitems(config, items):
    selection.deselect(config, items)


def pytest_collection_finish():
    # They stay until the end. Otherwise, each gc.collect() of a test would visit them, which takes a third of a second.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    # By now, the fixtures have ended the programs that they started.
    close_forker()


@pytest.fixture(name="durations", autouse=True)
def _durations(request):
    """Changes how long the library waits: ``durations(opening=0.3)``, until the test, or the block it begins, ends.

    A busy machine stalls for a second or two: that alone must not make a take give up. Servers of tests are flushed
    often: a chief that begins on one asks whether workers are left only in a test that loses data.
    """
    before = {name: getattr(durations, name) for name in type(durations).__slots__}

    def change(**seconds):
        was = {name: getattr(durations, name) for name in seconds}
        for name, value in seconds.items():
            setattr(durations, name, value)

        @contextlib.contextmanager
        def restoring():
            yield
            change(**was)

        return restoring()

    change(last_poll=5.0, release=30.0, **({} if "loses_data" in request.keywords else {"young": 0.0}))
    yield change
    change(**before)


@pytest.fixture
def nobody_is_late(durations):
    """Keeps workers from being late in this process, however slow the machine is."""
    durations(late=600.0)


@pytest.fixture
def clock(tmp_path_factory):
    """A clock that the test moves, instead of waiting until a lease, a pause or an expiry is over."""
    moved = MovedClock(tmp_path_factory.mktemp("clock"), moves=True)
    yield moved
    moved.restore()


@pytest.fixture(scope="session")
def _servers():
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
def server(request, server_name, _servers):
    """One of the chosen servers, with an empty database. At the end, every key in it must have an owner."""
    forges = request.node.get_closest_marker("forges") is not None
    # First of all, because what is opened on the server has to follow it.
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    for under_test in _server(server_name, _servers, look=not forges):
        if clock is not None:
            clock.clients.append(under_test.client())
        yield under_test


@pytest.fixture
def real_server(server):
    """As `server`, but never the fake one: it can be reached from other processes."""
    assert server.real
    return server


def _server(name, servers, *, look):
    under_test = ServerUnderTest(name, None if name == FAKE else servers.get(name))
    looking = under_test.client() if name == FAKE else servers.client(name)
    looking.flushall()
    yield under_test
    # Every fixture that opens accumulators depends on this one, and has closed them by now.
    try:
        if look:
            assert leftovers(looking) == []
    finally:
        under_test.close()


@pytest.fixture
def client(server):
    """A client of the server, at its empty database."""
    return server.client()


@pytest.fixture
def real_client(real_server, client):
    """As `client`, but never of the fake server."""
    return client


@pytest.fixture
def accumulator_client(request, server, client):
    """The client that the test's accumulators are opened with, of the kind that --clients names."""
    kind = getattr(request, "param", None)
    if kind is None or not server.real:
        yield client
        return
    if kind == selection.ASYNCIO:
        driven = DrivenClient(client)
        yield driven
        driven.close()
        return
    with kind.connected(server.port) as made:
        yield made


@pytest.fixture
def proxy(real_server, real_client):
    """A proxy before the server of this test, or before each node of its cluster."""
    if real_server.name != CLUSTER:
        with proxy_before_server(real_server.url) as proxy:
            yield proxy
        return
    with contextlib.closing(ClusterProxy([node.port for node in real_client.get_primaries()])) as proxy:
        yield proxy


@pytest.fixture
def outages(proxy, caplog):
    """Begins outages of what is behind the proxy, which end when a process has said that it waits."""
    made = Outages(proxy, caplog)
    yield made
    made.close()


@pytest.fixture(scope="session")
def everything(pytestconfig):
    """Whether tests try everything they can, or only what `make test` has time for."""
    return selection.everything(pytestconfig)


@pytest.fixture
def storage(request):
    """How this test stores gradients: a key of selection.STORAGES, and in effect."""
    return str(request.param)


class Opener:
    """Opens accumulators of one kind on the test's server and closes them when the test ends."""

    def __init__(
        self,
        kind,
        client,
        limits,
        *,
        encoding=None,
        **options,
    ):
        self._kind = kind
        # How gradients of float32 travel, unless the test says so.
        self._encoding = encoding
        self._options = options
        self._client = client
        self._limits = limits
        self._opened = []

    def __call__(self, *schema, **options):
        options = {"redis": self._client, **self._options, **options}
        limits = options.get("limits") or redisacc.Limits()
        own = {name: value for name, value in self._limits.items() if getattr(limits, name) is None}
        options["limits"] = dataclasses.replace(limits, **own)
        if self._encoding and schema[0] in ("float32", np.float32):
            options.setdefault("encoding", self._encoding)
        accumulator = _opened(self._client, self._kind, *schema, **options)
        self._opened.append(accumulator)
        return accumulator

    def close(self):
        for accumulator in self._opened:
            accumulator.close()


def _opened(client, kind, *args, **options):
    """Opens a handle of a class, or of the one for asyncio."""
    return client.open(kind, *args, **options) if isinstance(client, DrivenClient) else kind(*args, **options)


def _opener(kind, client, storage):
    options = {"partitions": 3} if storage == "partitions" else {}
    if storage == "encoded":
        options["encoding"] = "bfloat16"
    limits = {} if storage is None else {"in_place": selection.STORAGES[storage]}
    if storage in selection.IN_PARTS:
        limits["inline"] = 0
    opener = Opener(kind, client, limits, **options)
    yield opener
    opener.close()


@pytest.fixture
def open_dense_stored(accumulator_client, storage):
    """Opens dense accumulators that store every gradient the way of `storage`."""
    yield from _opener(redisacc.ConditionalAccumulator, accumulator_client, storage)


@pytest.fixture
def open_sparse_stored(accumulator_client, storage):
    """Opens sparse accumulators that store every gradient the way of `storage`."""
    yield from _opener(redisacc.SparseConditionalAccumulator, accumulator_client, storage)


@pytest.fixture
def parameter_partitions(request):
    """The number of partitions of parameters that the test opens; None: their values are in one slot."""
    return getattr(request, "param", None)


@pytest.fixture
def open_parameters(accumulator_client, parameter_partitions):
    """Opens parameters on the test's server and closes the handles when the test ends."""
    handles = []

    def open_one(shared_name="weights", **options):
        options = {"redis": accumulator_client, "partitions": parameter_partitions, **options}
        handles.append(_opened(accumulator_client, redisacc.Parameters, shared_name, **options))
        return handles[-1]

    yield open_one
    for handle in handles:
        handle.close()


@pytest.fixture
def open_dense(accumulator_client):
    """Opens dense accumulators with the usual limits, for tests in which storage plays no role."""
    yield from _opener(redisacc.ConditionalAccumulator, accumulator_client, None)


@pytest.fixture
def open_sparse(accumulator_client):
    """Opens sparse accumulators with the usual limits, for tests in which storage plays no role."""
    yield from _opener(redisacc.SparseConditionalAccumulator, accumulator_client, None)


@pytest.fixture
def open_tree(accumulator_client):
    """Opens accumulators of trees with the usual limits, for tests in which storage plays no role."""
    yield from _opener(redisacc.TreeAccumulator, accumulator_client, None)


# A listener outlives its last take by some seconds, in case there is another. Most tests have clients of their own, but
# those that connect by the server's URL share a listener if they follow each other. One that is older must end soon.
LISTENER_AGE = 30.0
_listeners_seen = weakref.WeakKeyDictionary()


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_frozen():
    """What pytest and the libraries keep grows with each test, is no garbage, and would be visited by gc.collect()."""
    # Also finds what a test of the file before has left in the oldest generation.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _garbage_collected():
    """What a test leaves to the garbage collector, such as an open socket, fails this test and not a later one."""
    yield
    # Not the oldest generation, which takes five times as long: a test is too short for its garbage to get there.
    gc.collect(1)


@pytest.fixture(autouse=True)
def _threads_checked():
    """No thread outlives its test, except, for a while, listeners."""
    before = set(threading.enumerate())
    yield

    def left():
        found = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in found if not thread.name.startswith("redisacc-")] + _named("redisacc-leases")

    def ended():
        if left():
            gc.collect()
            return False
        return True

    until(ended, 5, details=lambda: f"threads left behind: {left()}")
    now = time.monotonic()
    for thread in _named("redisacc-"):
        if thread.name == "redisacc-events" and now - _listeners_seen.setdefault(thread, now) > LISTENER_AGE:
            thread.join(LISTENER_AGE)
            assert not thread.is_alive(), f"a listener that never ends: {thread}"


def _named(beginning):
    return [thread for thread in threading.enumerate() if thread.name.startswith(beginning)]


@pytest.fixture
def background():
    """Starts functions in threads; the test fails if one of them outlives it."""
    started = []

    def start(function, *args, **options):
        one = Background(function, args, options)
        started.append(one)
        return one

    yield start
    for one in started:
        one.join()


@pytest.fixture
def fork():
    """Forks processes. They end with the test, before the server is looked at."""
    children = []

    def start(work):
        children.append(Child(work))
        return children[-1]

    yield start
    for child in children:
        child.close()


class Background:
    """A call in a thread of its own, and its outcome."""

    def __init__(self, function, args, options):
        self._value = None
        self._error = None

        def run():
            try:
                self._value = function(*args, **options)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self):
        return self._thread.is_alive()

    def join(self, timeout=20):
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call still blocks"

    def result(self, timeout=20):
        """The call's value, or its exception, once it has ended."""
        self.join(timeout)
        if self._error is not None:
            raise self._error
        return self._value


@pytest.fixture(name="until")
def _until():
    """Waits for a condition to come true and returns its first true value."""
    return until


@pytest.fixture
def full_disk():
    """Makes files of this process as small as if the disk were full: at most 128 KiB."""

    @contextlib.contextmanager
    def limited():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def daemon(server_name, tmp_path):
    """Makes daemons of one of the chosen servers, each in a folder of its own; they are gone when the test ends."""
    program = executable(server_name)
    made = []

    def make(*options, **more):
        made.append(Daemon(program, tmp_path / f"daemon-{len(made)}", *options, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()


KINDS = {
    "dense": redisacc.ConditionalAccumulator,
    "sparse": redisacc.SparseConditionalAccumulator,
    "tree": redisacc.TreeAccumulator,
}


@pytest.fixture
def open_accumulator():
    """Opens accumulators on any server; they are closed when the test ends."""
    handles = []

    def open_one(kind, *args, **options):
        handles.append(KINDS[kind](*args, **options))
        return handles[-1]

    yield open_one
    for handle in handles:
        handle.close()
