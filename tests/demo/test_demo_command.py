"""`redisacc demo` as a user runs it: real processes, a real server."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.leaks import remaining

from redisacc.tools.cli import main
from redisacc.tools.cli.demo import demo

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(180)]


@contextlib.contextmanager
def running(*options, url=None):
    """Runs redisacc in a session of its own, as a terminal does, and kills it at the end if it still runs."""
    environment = {name: value for name, value in os.environ.items() if name != "REDISACC_URL"}
    if url is not None:
        environment["REDISACC_URL"] = url
    with subprocess.Popen(
        [sys.executable, "-m", "redisacc", *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(*options, url=None):
    with running(*options, url=url) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def without_waiting(err):
    """Removes what a busy machine, on which processes start slowly, adds."""
    return re.sub(r".*still waiting.*\n", "", err)


def of_the_run(err):
    """Returns the lines of the run itself. What its processes log depends on where they are just then."""
    return "".join(line for line in err.splitlines(keepends=True) if line.startswith("redisacc "))


def keys(client):
    return {*remaining(client)} - {b"redisacc:names"}


def training(client, until):
    """Waits until a training has done some steps. Returns its name, and the ids of its processes."""

    def found():
        for key in client.keys("redisacc:{demo-*}"):
            if int(client.hget(key, "global_step") or 0) >= 3:
                return key.decode()[len("redisacc:{") : -1]
        return None

    name = until(found, 90)
    [crew] = client.keys(f"redisacc:{{{name}}}*crew*")
    return name, [int(member.rpartition(b":")[2].split()[0]) for _, member in sorted(client.hgetall(crew).items())]


def gone(pids):
    def is_gone(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    return all(map(is_gone, pids))


@pytest.mark.slow
def test_on_its_own_server():
    status, out, err = run("demo", "--workers", "2", "--steps", "60")
    assert status == 0
    # They said nothing but which were killed, where the run went on, and who leads. An error would stand here as well.
    # Without a pause, if this machine is so slow that it had lived for ten seconds.
    lines = re.sub(r"worker \d \| .* is the chief; standing by to follow it\n", "", without_waiting(err))
    killed = r"redisacc \| worker {} was killed by SIGKILL; it restarts( in [\d.]+ s)?\n"
    continues = r"worker \d \| demo-[0-9a-f]{{6}}: continuing at step {}\n"
    first = killed.format(r"\d") + continues.format(20)
    # The one that is killed then may lead as well.
    assert re.fullmatch(first + killed.format(0) + f"({continues.format(40)})?", lines), err
    assert re.search(
        r"^Look inside: redisacc watch demo-[0-9a-f]{6} --redis redis://127.0.0.1:\d+/0$", out, re.MULTILINE
    )
    before, after = re.findall(r"Neighbors \w+ training:\n  exception  (\w+, .*)", out)
    assert before != after
    # Each step is there once: nothing was repeated, and nothing was left out.
    steps = [1, *range(6, 61, 6)]
    together = re.findall(r"^worker \d \| step (\d+)/60  loss (\d\.\d+)$", out, re.MULTILINE)
    alone = re.findall(r"^step (\d+)/60  loss (\d\.\d+)$", out, re.MULTILINE)
    assert [int(step) for step, _ in together] == [int(step) for step, _ in alone] == steps
    assert together == alone
    assert "Largest difference of a parameter between the two results: " in out
    assert out.endswith("The results agree, and the loss fell.\n")
    # A pipe gets plain lines, which fit a terminal of the usual width.
    assert "\x1b" not in out
    assert "\r" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.thorough
def test_on_several_machines(real_client, real_server):
    words = "-- {} -m redisacc.tools.demo.training apart --workers 2 --steps 15"
    program = words.format(sys.executable).split()
    with contextlib.ExitStack() as stack:

        def start(*options):
            return stack.enter_context(running("run", *options, *program, url=real_server.url))

        second = start("--workers", "1", "--first-worker", "1", "--total-workers", "2")
        first = start("--workers", "1", "--total-workers", "2")
        for process in (first, second):
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    check = subprocess.run(
        program[1:], env=os.environ | {"REDISACC_URL": real_server.url}, capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stderr) == (0, "")
    assert check.stdout.endswith("The results agree, and the loss fell.\n")
    assert CliRunner().invoke(main, ["rm", "apart", "--yes", "--redis", real_server.url]).exit_code == 0
    assert keys(real_client) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGINT, 130, "redisacc | stopping; Ctrl-C again kills what still runs\n"),
        pytest.param(signal.SIGTERM, 143, "", marks=pytest.mark.thorough),
        pytest.param(signal.SIGHUP, 129, "", marks=pytest.mark.thorough),
    ],
)
def test_stopped(
    real_client,
    real_server,
    until,
    number,
    status,
    message,
):
    with running("demo", "--workers", "2", "--steps", "100000", url=real_server.url) as process:
        _, processes = training(real_client, until)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert of_the_run(err) == message
    # The leases as well: all processes gave theirs back.
    assert keys(real_client) == set()
    assert gone(processes)


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--redis", "redis://127.0.0.1:1"], 6, "127.0.0.1:1"),
        (["--redis", "http://x"], 2, "redis"),
        (["--redis", "redis://:secret@127.0.0.1:1/0"], 6, "127.0.0.1:1"),
    ],
)
def test_errors_at_the_start(options, exit_code, message):
    found = CliRunner().invoke(demo, options)
    assert (found.exit_code, message in found.stderr) == (exit_code, True), found.stderr
    assert "secret" not in found.output
