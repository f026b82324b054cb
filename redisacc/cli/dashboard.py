"""The command `redisacc dashboard`: serves a page that shows live what happens."""

from __future__ import annotations

import contextlib
import os
import socket

import click

from redisacc._clock import durations
from redisacc._monitoring.monitor import Monitor
from redisacc._text import is_unicode
from redisacc.cli.shared.failures import EXIT_CODES, USAGE, fail, report_failures
from redisacc.cli.shared.options import Seconds, names_argument, port_option, redis_option, targets_of, transport_of
from redisacc.errors import RedisAccError

try:
    import uvicorn

    from redisacc._dashboard.access import SHORTEST_TOKEN, is_loopback
    from redisacc._dashboard.app import make_app
    from redisacc._dashboard.feed import Feed
except ImportError:
    fail("dashboard needs starlette and uvicorn: pip install 'redisacc[dashboard]'", USAGE)

__all__ = ["dashboard"]

# Not an option, because every user of the machine can read the command line.
_TOKEN = "REDISACC_DASHBOARD_TOKEN"  # noqa: S105 - a name
# Seconds that open pages have to go away when the command is stopped.
_LAST_SECONDS = 2


@click.command(epilog=EXIT_CODES)
@names_argument
@port_option(9465)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. One that other machines can reach needs a token.",
)
@click.option(
    "--interval",
    type=Seconds(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two updates.",
)
@redis_option
@report_failures
def dashboard(*, names: tuple[str, ...], port: int, host: str, interval: float, url: str | None) -> None:
    """Serve a page that shows live what happens, at http://HOST:PORT/.

    It shows all accumulators, or the named ones; NAME may be a glob, as for ls. For each, it shows the round that is
    filling, the workers that are missing, and where the time of the latest rounds went. Nothing can be changed on it.
    Ctrl-C stops the command.

    By default, only this machine can reach the page. Everybody on it can, unless the environment variable
    REDISACC_DASHBOARD_TOKEN holds a token of at least 16 characters, which the page then asks for. With a token, --host
    may name any address. The page has no encryption of its own: put a proxy with TLS before it, or use
    `ssh -L 9465:localhost:9465 MACHINE`.

    \b
      redisacc dashboard
      redisacc dashboard 'train-*' --port 8080
    """
    token = _token()
    if token is None and not is_loopback(host):
        fail(
            f"other machines could reach {host}, so the page needs a token: set the environment variable {_TOKEN}, for "
            f'example with `export {_TOKEN}="$(openssl rand -hex 16)"`',
            USAGE,
        )
    transport = transport_of(url)
    shown = f"[{host}]" if ":" in host else host
    asks = ", which asks for the token" if token else ""
    with (
        contextlib.closing(_listen(host, port)) as listening,
        contextlib.closing(Monitor(transport, *targets_of(names))) as monitor,
    ):
        # In a cluster, it listens to the accumulators that it has read.
        with contextlib.suppress(RedisAccError):
            monitor.refresh(timeout=durations.opening)
        feed = Feed(transport, monitor, interval)
        # No log of requests, nor of those that break off: the application logs its own failures. The cookie and the
        # token are in no log either.
        config = uvicorn.Config(
            make_app(feed, token),
            access_log=False,
            log_level="critical",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        where = f"http://{shown}:{listening.getsockname()[1]}/"
        click.echo(f"dashboard of {transport.address} at {where}{asks}, Ctrl-C stops")
        _Server(config, feed).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the updates of open pages before it waits for these to go away."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops serving."""
        self._feed.close()
        await super().shutdown(sockets)


def _token() -> str | None:
    """Returns the token of the environment; None if there is none."""
    token = os.environ.get(_TOKEN, "").strip()
    if not is_unicode(token):
        fail(f"{_TOKEN} must be valid UTF-8", USAGE)
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
