"""Which tests belong to `make test`, which to `make check`, and which to `make test-rest` only.

`make test` takes three minutes: it tests every behaviour, and every fault that can be injected without waiting, mostly
on one server. `make check` is for CI: it adds (--slow) what needs seconds of processor time, many processes, or further
servers. `make test-rest` is for once a week: it runs (--rest) what neither of them does, which are the parameters and
servers whose difference plays no role in a test. The option --all is for a few tests that are named, and stands for
everything.

A test that takes a server has a case for each server family it can run on. `make test` runs it on Valkey, and on the
fake server if it can run on no other; `make test-fast` is for the fake server. The marker `every_server` adds the
oldest Redis and the cluster to `make check` (where each script runs on each server, to `make test`), if need be with
some of the test's parameters only. Redis 7, from which Valkey descends, is left to `make test-rest`. The marker
`slow` leaves a test, or most of its cases, to `make check`, and the marker `thorough` leaves it to `make test-rest`. A
test that tries more places or examples with --all takes the fixture `everything`, which says so; --rest repeats it.
Servers that are named with --servers are all used, whatever the markers say.

What is left out is deselected, never skipped, so the summary line counts it.
"""

import itertools
import os
import re

import pytest

from support.clients import ALL as ALL_CLIENTS
from support.servers import CLUSTER, FAKE, NAMES, MissingError, executable

REAL = tuple(name for name in NAMES if name != FAKE)
# For tests that need all keys on one server.
ONE_NODE = tuple(name for name in NAMES if name != CLUSTER)

# in_place_limit for each way of storing gradients. Tests use small gradients: "buffered_parts" counts them as large.
# "encoded" sends float32 as bfloat16, in which the small numbers of most tests lose nothing.
STORAGES = {"in_place": 10**9, "buffered_inline": 0, "buffered_parts": 0, "partitions": 0, "encoded": 0}
# Those in which gradients have parts.
IN_PARTS = ("buffered_parts", "partitions")
# Servers on which tests use all of them. Only the place of the bytes differs, not the behaviour of the server.
ALL_STORAGES = (FAKE, "valkey")
# Partitions differ from parts only in where these lie, and encoded gradients in how many bytes they have, so most tests
# use them in `make test-rest` only.
UNUSUAL_STORAGES = ("partitions", "encoded")
# A gradient that is held whole is in its entry or in parts. A test that uses both does the first in `make check` only.
SLOW_STORAGE = "buffered_inline"

MARKERS = (
    "servers(*names): the servers that the test can run on; all of them if there is no such marker",
    "every_server(*names, **params): in `make check` also on these servers (none: Redis 6.2 and the cluster), "
    "but only with these parameters",
    "usual(storage=..., client=...): with what `make test` runs it; client='asyncio': for redisacc.asyncio as well",
    "fixed(*what): the test itself says which 'client', 'encoding' or number of 'partitions', which plays a role in it",
    "slow(keep=regex): in `make check`, but not in `make test`, except cases in whose id `keep` is found",
    "thorough: not in `make check`, but in `make test-rest`",
    "loses_data: loses data by FLUSHALL or a restart, so that a chief asks whether workers are left",
    "forges: writes foreign keys itself, so the check for leftovers is left out",
)
# The kind of client by which accumulators are opened with redisacc.asyncio.
ASYNCIO = "asyncio"
# Lies between Redis 6.2 and Valkey, so that a test that both pass rarely fails here.
BETWEEN = "redis7"
# The mark of a case that only every_server brings into `make check`.
_EXTRA = "extra_server"
# The mark of a case that has no server to run on.
_NOWHERE = "without_server"


def thorough(values, *, usual):
    """Returns parameters of which `make check` runs those in ``usual``, and `make test-rest` the others.

    Args:
        values: what pytest.mark.parametrize takes.
        usual: some of the values.
    """
    values = list(values)
    assert all(value in values for value in usual), "a parameter that is usual is none of the parameters"

    def marked(value):
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)

    return [value if value in usual else marked(value) for value in values]


def add_options(parser):
    """Adds --servers, --clients, --slow, --rest, --all and --long."""
    group = parser.getgroup("redisacc")
    group.addoption("--servers", help="the servers to use, all of them for every test, as in: " + ",".join(NAMES))
    group.addoption(
        "--clients",
        help="the kinds of clients (support/clients.py) that open accumulators, for every test: parts of their names, "
        "as in: valkey-py,tls; or all. A prefix turn: gives each test one of them in turn, as in: turn:valkey-py",
    )
    group.addoption("--all", action="store_true", help="every test on every server, with all of its parameters")
    group.addoption("--slow", action="store_true", help="what `make check` adds to `make test`")
    group.addoption("--rest", action="store_true", help="what neither `make test` nor `make check` runs")
    group.addoption(
        "--long", action="store_true", default=os.environ.get("REDISACC_LONG") == "1", help="search for longer"
    )


def configure(config):
    """Registers the markers and finds the servers of this machine.

    Raises:
        pytest.UsageError: --servers has an unknown name; or, in CI, a server is missing.
    """
    for marker in (*MARKERS, f"{_EXTRA}: selected because of every_server", f"{_NOWHERE}: no server can run it"):
        config.addinivalue_line("markers", marker)
    names = chosen(config)
    if unknown := set(names) - set(NAMES):
        raise pytest.UsageError(f"--servers: unknown {sorted(unknown)}, there are {', '.join(NAMES)}")
    missing = {}
    for name in names:
        try:
            if name != FAKE:
                executable(name)
        except MissingError as error:
            missing[name] = str(error)
            if os.environ.get("CI", "").lower() in ("true", "1") and not error.excused:
                raise pytest.UsageError(f"no server {name}: {error}. In CI none may be missing.") from None
    config.stash[MISSING] = missing


# Servers that were chosen and that this machine does not have, and why.
MISSING = pytest.StashKey[dict[str, str]]()


def everything(config):
    """Returns whether tests try everything they can, and not only what `make check` has time for."""
    return bool(config.getoption("--all") or config.getoption("--rest"))


def chosen(config):
    """Returns the names of the servers that are to be used."""
    names = config.getoption("--servers")
    return list(NAMES) if names is None else [name for name in names.split(",") if name]


def clients(config):
    """Returns the names of the kinds of clients that --clients names; none by default.

    Raises:
        pytest.UsageError: a part of a name fits no kind.
    """
    given = (config.getoption("--clients") or "").removeprefix("turn:")
    found = {}
    for part in filter(None, given.split(",")):
        fitting = [name for name in ALL_CLIENTS if part in ("all", *name.split("-")) or part in name]
        if part == ASYNCIO:
            fitting = [ASYNCIO]
        if not fitting:
            raise pytest.UsageError(f"--clients: {part!r} is in none of {', '.join(ALL_CLIENTS)}")
        found |= dict.fromkeys(fitting)
    return list(found)


_turns = itertools.count()


def parametrize_client(metafunc):
    """Sets the kind of client that opens a test's accumulators, where --clients asks for it."""
    if "accumulator_client" not in metafunc.fixturenames:
        return
    names = clients(metafunc.config)
    if not names:
        if "behaviour" in metafunc.module.__file__ and not _is_fixed(metafunc.definition, "client"):
            marks = () if ASYNCIO in _usual(metafunc.definition, "client") else (pytest.mark.thorough,)
            cases = [pytest.param(None, id="blocking"), pytest.param(ASYNCIO, marks=marks, id=ASYNCIO)]
            _parametrize(metafunc, "accumulator_client", cases, indirect=True)
        return
    if metafunc.config.getoption("--clients").startswith("turn:"):
        names = [names[next(_turns) % len(names)]]
    metafunc.parametrize(
        "accumulator_client", [ALL_CLIENTS.get(name, name) for name in names], ids=names, indirect=True
    )


def parametrize_partitions(metafunc):
    """Sets the number of partitions of the parameters that a test of behaviour opens."""
    if "open_parameters" in metafunc.fixturenames and "behaviour" in metafunc.module.__file__:
        cases = [pytest.param(None, id="slot")]
        if not _is_fixed(metafunc.definition, "partitions"):
            cases.append(pytest.param(3, marks=pytest.mark.thorough, id="partitions"))
        _parametrize(metafunc, "parameter_partitions", cases, indirect=True)


def parametrize_server(metafunc):
    """Sets the parameters `server_name` and `storage` of a test that uses them."""
    if "server_name" not in metafunc.fixturenames:
        return
    config, definition = metafunc.config, metafunc.definition
    names = [name for name in chosen(config) if name not in config.stash[MISSING]]
    if "real_server" in metafunc.fixturenames or "daemon" in metafunc.fixturenames:
        names = [name for name in names if name != FAKE]
    if "daemon" in metafunc.fixturenames:
        names = [name for name in names if name != CLUSTER]
    for marker in definition.iter_markers("servers"):
        names = [name for name in names if name in marker.args]
    marks = dict.fromkeys(names, ())
    if not config.getoption("--servers"):
        usual = [name for name in names if name != FAKE][:1] or names
        added = ()
        if (marker := definition.get_closest_marker("every_server")) is not None:
            added = marker.args or tuple(name for name in names if name not in (BETWEEN, FAKE))
        for name in names:
            if name not in usual:
                marks[name] = (getattr(pytest.mark, _EXTRA) if name in added else pytest.mark.thorough,)
    if not names:
        names, marks = ["none"], {"none": (getattr(pytest.mark, _NOWHERE),)}
    if "storage" not in metafunc.fixturenames:
        _parametrize(metafunc, "server_name", [pytest.param(name, marks=marks[name]) for name in names])
        return
    # The fake server can't add in place: both limits come to the same there, which a test of its own shows.
    pairs = [
        (name, storage)
        for name in names
        for storage in STORAGES
        if (name != FAKE or storage != "in_place")
        and (name in ALL_STORAGES or storage not in IN_PARTS or (name, storage) == (CLUSTER, "partitions"))
        and (storage != "encoded" or (name == "valkey" and not _is_fixed(definition, "encoding")))
    ]
    storages = _usual(definition, "storage") or [name for name in STORAGES if name not in UNUSUAL_STORAGES]
    more = {storage: () if storage in storages else (pytest.mark.thorough,) for storage in STORAGES}
    if "buffered_parts" in storages and SLOW_STORAGE in storages:
        more[SLOW_STORAGE] = (pytest.mark.slow,)
    _parametrize(
        metafunc,
        ("server_name", "storage"),
        [pytest.param(*pair, marks=marks[pair[0]] + more[pair[1]], id="-".join(pair)) for pair in pairs],
        indirect=["storage"],
    )


def _parametrize(metafunc, names, cases, **options):
    """Parametrizes a test with the cases of this run: collecting the others would take longer than most tests."""
    if not everything(metafunc.config):
        cases = [case for case in cases if pytest.mark.thorough not in case.marks] or cases
    metafunc.parametrize(names, cases, **options)


def _usual(definition, what):
    """Returns the storages or clients with which `make test` runs a test, if a marker says so."""
    found = next((marker.kwargs[what] for marker in definition.iter_markers("usual") if what in marker.kwargs), ())
    return (found,) if isinstance(found, str) else found


def _is_fixed(definition, what):
    return any(what in marker.args for marker in definition.iter_markers("fixed"))


def _can_run(item):
    """Whether no marker of its parameters excludes the server; the test's own are read earlier."""
    params = getattr(item, "callspec", None) and item.callspec.params
    if not params or "server_name" not in params:
        return True
    if params.get("parameter_partitions") and (
        params["server_name"] not in ("valkey", CLUSTER) or params.get("accumulator_client") == ASYNCIO
    ):
        # Only the place of the bytes differs, not the behaviour of the server or the client.
        return False
    # The asyncio driver takes a client of one server; tests/event_loop has a cluster.
    if params.get("accumulator_client") == ASYNCIO and (
        _is_fixed(item, "client") or params.get("server_name") == CLUSTER
    ):
        return False
    if params.get("accumulator_client") == ASYNCIO and params["server_name"] != "valkey":
        # It is the same on all of them.
        return bool(item.config.getoption("--servers")) and params["server_name"] != FAKE
    return all(params["server_name"] in marker.args for marker in item.iter_markers("servers"))


def _is_representative(item):
    """Whether the case has the parameters that every_server names, if only that marker selects it."""
    if item.get_closest_marker(_EXTRA) is None:
        return True
    marker = item.get_closest_marker("every_server")
    assert marker is not None
    params = item.callspec.params
    assert marker.kwargs.keys() <= params.keys(), f"{item.nodeid}: every_server names a parameter that does not exist"
    return all(params[name] == value for name, value in marker.kwargs.items())


def _is_slow(item):
    """Whether a case that is not thorough is left to `make check`."""
    if item.get_closest_marker(_EXTRA) is not None and item.path.name != "test_every_server.py":
        return True
    marker = item.get_closest_marker("slow")
    keep = marker.kwargs.get("keep") if marker is not None else None
    return marker is not None and (keep is None or re.search(keep, item.name.partition("[")[2]) is None)


def deselect(config, items):
    """Removes from the collected tests those without a server, and those that are not part of this run."""
    slow, rest = config.getoption("--slow"), config.getoption("--rest")

    def runs(item):
        if item.get_closest_marker(_NOWHERE) or not _can_run(item):
            return False
        if config.getoption("--all"):
            return True
        if item.get_closest_marker("thorough") is not None or not _is_representative(item):
            return rest
        if rest:
            return "everything" in item.fixturenames
        return _is_slow(item) == slow

    left = [item for item in items if runs(item)]
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
        items[:] = left
