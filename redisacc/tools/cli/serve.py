"""The command `redisacc serve`: a page that shows live what happens, and metrics for Prometheus, on one port."""

from __future__ import annotations

import contextlib
import os
import socket

import click

from redisacc._clock import durations
from redisacc.embedded.addresses import is_loopback
from redisacc.errors import RedisAccError
from redisacc.tools.cli.shared.failures import USAGE, fail
from redisacc.tools.cli.shared.options import Seconds, command, names_argument, targets_of, the_server
from redisacc.tools.monitoring.monitor import Monitor

try:
    from redisacc.tools.dashboard.access import SHORTEST_TOKEN
    from redisacc.tools.dashboard.app import run
except ImportError:
    fail("serve needs starlette and uvicorn: pip install 'redisacc[serve]'", USAGE)

# Not an option, because every user of the machine can read the command line.
_TOKEN = "REDISACC_SERVE_TOKEN"  # noqa: S105 - a name


@command(json=False)
@names_argument
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9464,
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on. One that other machines can reach needs a token.",
)
@click.option(
    "--interval",
    type=Seconds(min=0.2, max=3600),
    default=1.0,
    metavar="S",
    help="Seconds between two updates of the page.",
)
def serve(*, names: tuple[str, ...], port: int, host: str, interval: float) -> None:
    """Serve a live page at http://HOST:PORT/, and metrics for Prometheus at http://HOST:PORT/metrics.

    Both show all accumulators, or the named ones; NAME may be a glob, as for ls. Ctrl-C stops the command.

    For each accumulator, the page shows the round that is filling, the workers that are missing, and where the time of
    the latest rounds went. Nothing can be changed on it.

    Each scrape of the metrics reads the server again. The histograms count what happened since the command was started.
    Of each accumulator's latest round, up to 32 metrics are exported.

    By default, only this machine can reach them. All its users can, unless the environment variable
    REDISACC_SERVE_TOKEN holds a token of at least 16 ASCII characters. Browsers then ask for it as a password, with any
    user name, and Prometheus sends it as a bearer token. With a token, --host may name any address. There is no
    encryption: put a proxy with TLS in front, or use `ssh -L 9464:localhost:9464 MACHINE`.

    \b
      redisacc serve
      redisacc serve 'train-*' --port 8080
    """
    token = _token()
    if token is None and not is_loopback(host):
        fail(
            f"other machines could reach {host}, so the page needs a token: set the environment variable {_TOKEN}, for "
            f'example with `export {_TOKEN}="$(openssl rand -hex 16)"`',
            USAGE,
        )
    transport = the_server()
    shown = f"[{host}]" if ":" in host else host
    with (
        contextlib.closing(_listen(host, port)) as listening,
        contextlib.closing(Monitor(transport, *targets_of(names))) as monitor,
    ):
        # In a cluster, it listens to the accumulators that it has read.
        with contextlib.suppress(RedisAccError):
            monitor.refresh(timeout=durations.opening)
        where = f"http://{shown}:{listening.getsockname()[1]}/"
        asks = ", which ask for the token" if token else ""
        click.echo(f"{transport.address}: page at {where} and metrics at {where}metrics{asks}; Ctrl-C stops")
        run(transport, monitor, listening, token=token, interval=interval)


def _token() -> str | None:
    """Returns the token of the environment; None if there is none."""
    token = os.environ.get(_TOKEN, "").strip()
    # Programs disagree on how to send others in a header.
    if not token.isascii():
        fail(f"{_TOKEN} must have only ASCII characters", USAGE)
    if token and len(token) < SHORTEST_TOKEN:
        fail(f"{_TOKEN} must have at least {SHORTEST_TOKEN} characters, not {len(token)}", USAGE)
    return token or None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        # The name of a host that no domain can have raises a UnicodeError.
        fail(f"cannot listen on {host}:{port}: {error}")
