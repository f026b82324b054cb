"""The command `redisacc run`: starts a chief and workers on this machine, and restarts those that die."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from redisacc._handles.environment import MAX_WORKERS, Place
from redisacc._text import MESSAGE, printable, shown
from redisacc._wire.connect import DEFAULT_URL
from redisacc.embedded import Server
from redisacc.tools.cli.server import own_server
from redisacc.tools.cli.shared.failures import fail, interrupts_raise, refuse
from redisacc.tools.cli.shared.options import NonEmptyPath, Seconds, command, transport_of
from redisacc.tools.cli.shared.output import given
from redisacc.tools.cli.shared.several_hosts import check_several_hosts, several_hosts_options, this_host
from redisacc.tools.launch.hosts.host import ThisHost
from redisacc.tools.launch.hosts.news import workers_text
from redisacc.tools.launch.restarts import PERMANENT, Restarts
from redisacc.tools.launch.run import VISIBLE_GPUS, CannotStartError, Run, places
from redisacc.tools.launch.server_keeper import ServerKeeper

# Each worker needs two pipes, and a process may usually have 1,024 descriptors.
_MOST_WORKERS = 256

_NOT_EXECUTABLE, _NO_SUCH_COMMAND = 126, 127


@command(
    json=False,
    # With --hosts, it is that of the hosts.
    password=False,
    # Options behind the program belong to the program, also without --.
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 the chief, or without a chief every worker, has ended with 0; the code of a process that "
    "failed too often, or with one of --give-up-on; 128 + N for signal N, so 130 for Ctrl-C; 2 wrong usage, 6 no "
    "server answers, 126 the program is not executable, 127 there is no such program.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, _MOST_WORKERS),
    required=True,
    metavar="N",
    help="Number of workers on this machine.",
)
@click.option(
    "--chief",
    "with_chief",
    is_flag=True,
    help="Start a chief too, for a program that uses Chief and Worker. A program with a Training needs none.",
)
@click.option(
    "--first-worker",
    type=click.IntRange(0, MAX_WORKERS - 1),
    default=0,
    metavar="K",
    help="Number of the first worker on this machine. Numbers must be distinct across machines.",
)
@click.option(
    "--total-workers",
    type=click.IntRange(1, MAX_WORKERS),
    metavar="N",
    help="Number of workers on all machines, if there are others.  [default: --workers, unless the first one is not 0]",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of GPUs that the workers on this machine share, in turn. Each process sees its own in "
    "CUDA_VISIBLE_DEVICES, and a chief none.  [default: each sees all]",
)
@click.option(
    "--ranks",
    is_flag=True,
    help="Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each worker, as torchrun does. Not for programs "
    "with Transformers, Lightning or accelerate, which would then start torch.distributed.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0, 1_000_000),
    default=5,
    metavar="N",
    help="How often a process that fails restarts within an hour. After one more failure, the run ends.",
)
@click.option(
    "--give-up-on",
    type=click.IntRange(1, 255),
    multiple=True,
    default=PERMANENT,
    metavar="CODE",
    help="Exit code of a program that would fail again: the run ends at once. May be repeated.",
)
@click.option(
    "--grace",
    type=Seconds(0, 86400),
    default=10,
    metavar="SECONDS",
    help="Time for workers to end after the chief has finished, and between SIGTERM and SIGKILL.",
)
@click.option("--server", "with_server", is_flag=True, help="Start a server too. It ends with the run.")
@click.option(
    "--server-dir",
    type=NonEmptyPath(),
    metavar="DIR",
    help="Keep the data of that server, or of this host's nodes, in this directory, so that the next run continues.  "
    "[default: a temporary one]",
)
@click.option(
    "--durable/--no-durable",
    default=None,
    help="With --server-dir: write every change to disk, or a snapshot a minute.  [default: every change]",
)
@click.option(
    "--server-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="TCP port of that server, on the loopback interface only.  [default: a free one]",
)
@several_hosts_options
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] PROGRAM [ARGUMENT]...")
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    workers: int,
    with_chief: bool,
    first_worker: int,
    total_workers: int | None,
    gpus: int | None,
    ranks: bool,
    restarts: int,
    give_up_on: tuple[int, ...],
    grace: float,
    with_server: bool,
    server_dir: Path | None,
    durable: bool | None,
    server_port: int | None,
    program: tuple[str, ...],
    **hosts: Any,
) -> None:
    """Run N workers on this machine, all with the same program.

    \b
      redisacc run --workers 3 -- python train.py --rate 0.1

    Each process finds its place in its environment: REDISACC_ROLE (chief or worker), REDISACC_WORKER_NUMBER,
    REDISACC_WORKERS, REDISACC_URL and REDISACC_RUN_ID. A process that fails or is killed restarts at once, or after a
    growing pause if it fails within seconds. A worker that exits with 0 has finished. The run ends when all have
    finished; with --chief, when the chief has.

    Each line of the output begins with the name of its process. Ctrl-C stops all processes; a second one kills them.
    SIGUSR1 and SIGUSR2 are passed on to them. SIGHUP is passed on, and ends the run.

    On several hosts, start the same command on each. They meet at the address of one of them:

    \b
      redisacc run --hosts 4 --meet host1:6400 --workers 2 \\
        -- python train.py

    Or let further machines run further workers, against a server that all of them reach:

    \b
      redisacc run --first-worker 3 --workers 2 -- python train.py
    """
    check_several_hosts(**hosts)
    url = given("url")
    is_given = context.get_parameter_source("url") is ParameterSource.COMMANDLINE
    has_server = with_server or server_dir is not None or server_port is not None
    refuse(has_server and is_given, "give --redis or --server, not both")
    refuse(
        durable is not None and server_dir is None,
        f"{'--durable' if durable else '--no-durable'} needs --server-dir: in a temporary directory, nothing "
        "outlives the run",
    )
    is_durable = server_dir is not None and durable is not False
    refuse(not with_chief and not workers, "there is nothing to run: give at least one worker, or --chief")
    if hosts["hosts"] is not None:
        refuse(not workers, "with --hosts, each host has at least one worker")
        refuse(
            first_worker or total_workers is not None,
            "with --hosts, workers get their numbers from the hosts: leave out --first-worker and --total-workers",
        )
        refuse(
            with_server or server_port is not None,
            "with --hosts, each host starts a node: leave out --server, and see --node-port",
        )
    refuse(
        first_worker + workers > (total_workers or MAX_WORKERS),
        f"the last worker here has the number {first_worker + workers - 1}, because workers count from 0: that is "
        f"too large for {total_workers or MAX_WORKERS} workers on all machines",
    )
    # A run has all workers, unless it is told otherwise, or only the later ones.
    if total_workers is None and workers and (has_server or with_chief or not first_worker):
        total_workers = first_worker + workers
    _check_program(program[0])
    visible = os.environ.get(VISIBLE_GPUS, "")
    refuse(
        gpus is not None and visible and gpus > len(visible.split(",")),
        f"--gpus is {gpus}, but {VISIBLE_GPUS} lists only {shown(visible)}",
    )

    restarts_of = partial(Restarts, restarts)
    new_run = partial(Run, command=program, gpus=gpus, ranks=ranks, give_up_on=give_up_on, grace=grace)
    try:
        if hosts["hosts"] is None:
            members = places(chief=with_chief, workers=workers, first_worker=first_worker, total_workers=total_workers)
            with own_server(server_dir, server_port, durable=is_durable) if has_server else nullcontext() as server:
                code = _run_alone(server, url, members, new_run, restarts_of, keeps_data=server_dir is not None)
        else:
            host = this_host(
                **hosts,
                workers=workers,
                chief=with_chief,
                nodes=not is_given,
                program=program,
                directory=server_dir,
                durable=is_durable,
                restarts=restarts_of,
                grace=grace,
                say=lambda text: click.echo(f"redisacc | {printable(text, MESSAGE)}", err=True),
            )
            code = _run_with_others(host, url if is_given else None, new_run)
    except CannotStartError as error:
        fail(str(error), error.exit_code)
    raise SystemExit(code)


def _environment(url: str) -> dict[str, str]:
    # Lines appear when they are written, and not when a block of them is full.
    return {"PYTHONUNBUFFERED": "1", **os.environ, "REDISACC_URL": url}


def _run_alone(
    server: Server | None,
    url: str | None,
    members: Sequence[Place],
    new_run: Callable[..., Run],
    restarts: Callable[[], Restarts],
    *,
    keeps_data: bool,
) -> int:
    """Runs the processes of a run on one machine. Returns the exit code."""
    if server is None:
        # Now, rather than as a traceback of every process.
        transport_of(url)
    address = url or DEFAULT_URL if server is None else server.url
    started = new_run(members, environment=_environment(address), restarts=restarts)
    if server is not None:
        started.look = ServerKeeper(server, restarts(), keeps_data=keeps_data).look
        # The process ids are for those who want to end or kill one of the two.
        how = f"started {server.version} as process {server.pid}; it is ready at {server.url}"
        started.say(f"process {os.getpid()} {how}")
    return started.wait()


def _run_with_others(host: ThisHost, url: str | None, new_run: Callable[..., Run]) -> int:
    """Runs this host's processes of a run on several hosts. Returns the exit code."""
    terms = host.terms
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP), host:
        host.come()
        total = None if host.is_guest else terms.hosts * terms.workers
        first = host.number * terms.workers
        chief = terms.chief and host.number == 0
        members = places(chief=chief, workers=terms.workers, first_worker=first, total_workers=total)
        reduce = [sys.executable, "-m", "redisacc", "reduce", "--quiet", "--node"]
        names = [f"reducer {number}" if number > 1 else "reducer" for number in range(1, len(host.addresses) + 1)]
        started = new_run(
            members,
            environment=_environment(url or host.url(password=True)),
            restarts=host.new_restarts,
            follows=host.follows,
            companions={name: [*reduce, address] for name, address in zip(names, host.addresses, strict=True)},
        )
        started.look = host.look
        started.say(f"process {os.getpid()} runs {workers_text(first, terms.workers)} on this host")
        if url is None:
            secret = "" if host.password is None else ", with the password in REDISACC_PASSWORD"
            started.say(f"to look at the run{secret}: redisacc ls --redis '{host.url(password=False)}'")
        code = started.wait()
        return host.finish(code, stopped=started.is_stopped)


def _check_program(program: str) -> None:
    """Checks, as a shell would, that the program can be executed, before anything is started."""
    if shutil.which(program) is not None:
        return
    path = Path(program)
    is_script = program.endswith(".py") and path.is_file()
    hint = f"; to run it with Python: python {program}" if is_script else ""
    if os.path.dirname(program) and path.exists():
        what = "a directory" if path.is_dir() else "not executable"
        fail(f"{shown(program)} is {what}{hint}", _NOT_EXECUTABLE)
    where = "does not exist" if os.path.dirname(program) else "is not a program on the PATH"
    fail(f"{shown(program)} {where}{hint}", _NO_SUCH_COMMAND)
