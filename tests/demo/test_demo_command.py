"""`redisacc demo` as a user runs it: real processes, a real server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from demo_text import small_text

import redisacc.cli.demo as command_module
from redisacc.cli.demo import _redis_cli, _without_password, demo
from redisacc.demo.exchange import LEASE
from redisacc.embedded import Server

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(180)]

SMALL = ("--workers", "2", "--dim", "8", "--batch", "64", "--seed", "5", "--subsampling", "0.01")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "small.txt"
    file.write_text(small_text(), encoding="utf-8")
    return file


@contextlib.contextmanager
def running(*options: str | Path, url: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs the demo in a session of its own, as a terminal does, and kills it at the end if it still runs."""
    environment = {name: value for name, value in os.environ.items() if name != "REDISACC_URL"}
    if url is not None:
        environment["REDISACC_URL"] = url
    with subprocess.Popen(
        [sys.executable, "-m", "redisacc", "demo", *map(str, options)],
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


def run(*options: str | Path, url: str | None = None) -> tuple[int, str, str]:
    with running(*options, url=url) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def without_waiting(err: str) -> str:
    """Removes the lines that the chief logs when a busy machine starts its workers slowly."""
    return re.sub(r".* waiting for worker-.*\n", "", err)


def keys(client: redis.Redis) -> set[bytes]:
    return set(client.keys("*")) - {b"redisacc:names"}


def worker_pid(client: redis.Redis, run_name: str, index: int, until: Callable[..., Any]) -> int:
    """Waits until the run has trained for some steps, and returns the process id of a worker."""
    pattern = f"redisacc-demo:{run_name}:*:worker:{index}"
    until(lambda: int(client.hget(f"redisacc:{{demo-{run_name}/loss}}", "global_step") or 0) >= 3, 60)
    return int(json.loads(client.get(client.keys(pattern)[0]))["pid"])


def test_on_its_own_server(text: Path) -> None:
    status, out, err = run("--text", text, *SMALL, "--epochs", "3", "--word", "ship")
    assert (status, without_waiting(err)) == (0, "")
    assert re.search(r"redis-cli -p \d+ HGETALL 'redisacc:\{demo-[0-9a-f]{6}/input\}'", out)
    for part in ("input", "output", "position", "loss"):
        assert f"/{part}}}'" in out
    assert re.search(r"Neighbours before training:\n  ship  \w+, \w+", out)
    after = re.search(r"Neighbours after training:\n  ship  (\w+), (\w+), (\w+)", out)
    assert after is not None
    # Three passes over a text of four topics are enough to tell the sea from the bakery.
    assert set(after.groups()) <= {"sea", "sail", "wind", "harbour", "wave", "anchor", "storm"}
    assert re.search(r"2 workers: step \d+/\d+  loss \d\.\d+  [\d,]+ gradients/s", out)
    assert re.search(r"one process: step \d+/\d+  loss \d\.\d+", out)
    assert "Largest difference of a parameter between the two results: " in out
    assert out.endswith("The results agree, and the loss fell.\n")
    # A pipe gets plain lines.
    assert "\x1b" not in out
    assert "\r" not in out


def test_on_a_given_server(text: Path, real_client: redis.Redis, real_server: Any, until: Any) -> None:
    options = ("--text", text, *SMALL, "--run", "given", "--epochs", "10")
    with running(*options, "--redis", real_server.url) as process:
        worker_pid(real_client, "given", 1, until)
        record = real_client.hgetall("redisacc:{demo-given/input}")
        assert {b"global_step", b"num_accumulated"} <= set(record)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, without_waiting(err)) == (0, "")
    assert f"Run given on {real_server.url}" in out
    assert keys(real_client) == set()


def test_chief_and_workers_apart(text: Path, real_client: redis.Redis, real_server: Any) -> None:
    with contextlib.ExitStack() as stack:

        def start(*options: str | Path) -> subprocess.Popen[str]:
            return stack.enter_context(running(*options, "--text", text, url=real_server.url))

        workers = [start("--role", "worker"), start("--role", "worker", "--worker-index", "1")]
        chief = start("--role", "chief", *SMALL, "--steps", "15")
        out, _ = chief.communicate(timeout=120)
        assert chief.returncode == 0, out
        numbers = []
        for worker in workers:
            _, log = worker.communicate(timeout=20)
            assert worker.returncode == 0, log
            numbers += re.findall(r"worker (\d) of 2 in run demo, 15 steps", log)
            assert "run demo is done" in log
        assert sorted(numbers) == ["0", "1"]
    assert "step 15/15" in out
    assert keys(real_client) == set()


def test_a_worker_with_another_text(text: Path, tmp_path: Path, real_client: redis.Redis, real_server: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text(small_text() + " ship ship", encoding="utf-8")
    with running("--role", "worker", "--text", other, url=real_server.url) as worker:
        status, _, err = run("--role", "chief", "--text", text, *SMALL, "--timeout", "3", url=real_server.url)
        assert status == 1
        assert "0 of 2 workers arrived within 3 seconds; missing: worker-0, worker-1" in err
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "this worker's text differs from the chief's" in err
    assert keys(real_client) == set()


def test_a_killed_worker(text: Path, real_client: redis.Redis, real_server: Any, until: Any) -> None:
    options = ("--text", text, *SMALL, "--run", "kill", "--epochs", "500")
    with running(*options, url=real_server.url) as process:
        victim, other = (worker_pid(real_client, "kill", index, until) for index in (1, 0))
        started = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    # Long before the timeout of a minute, which is for silent workers.
    assert time.monotonic() - started < 30
    assert re.fullmatch(
        r"redisacc demo: step \d+: 1 of 2 gradients arrived for demo-kill/\w+; missing: worker-1; "
        rf"worker-1 \(process {victim}\) was ended by signal 9 \(Killed\)\n",
        without_waiting(err),
    )
    assert keys(real_client) == set()
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "redisacc demo: stopped\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_stopped(
    text: Path,
    real_client: redis.Redis,
    real_server: Any,
    until: Any,
    number: signal.Signals,
    status: int,
    message: str,
) -> None:
    options = ("--text", text, *SMALL, "--run", "stop", "--epochs", "500")
    with running(*options, url=real_server.url) as process:
        worker = worker_pid(real_client, "stop", 0, until)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
    # The library may add that it was interrupted in a take.
    assert process.returncode == status
    assert without_waiting(err).endswith(message)
    assert "Traceback" not in err
    assert keys(real_client) == set()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_killed_with_everything(text: Path, real_client: redis.Redis, real_server: Any, until: Any) -> None:
    options = ("--text", text, *SMALL, "--run", "gone", "--epochs", "500")
    with running(*options, url=real_server.url) as process:
        workers = [worker_pid(real_client, "gone", index, until) for index in (0, 1)]
        process.kill()
        process.wait()
        # All leases expire at once here, instead of within 20 seconds. Then the workers notice that the chief is gone,
        # and delete the accumulators in its place.
        leased = real_client.keys("redisacc-demo:gone*")
        assert all(0 < real_client.ttl(key) <= LEASE for key in leased)
        real_client.delete(*leased)
        until(lambda: keys(real_client) == set(), 60)
        for worker in workers:
            until(lambda pid=worker: not Path(f"/proc/{pid}/cmdline").exists(), 10)


def test_results_that_differ_are_a_failure(
    text: Path, real_client: redis.Redis, real_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = command_module.train_in_one_process

    def with_another_rate(settings: Any, corpus: Any, on_step: Any) -> Any:
        return honest(replace(settings, rate=settings.rate * 1.01), corpus, on_step)

    monkeypatch.setattr(command_module, "train_in_one_process", with_another_rate)
    options = ["--text", str(text), *SMALL, "--steps", "15", "--redis", real_server.url]
    found = CliRunner().invoke(demo, options)
    assert found.exit_code == 1
    assert re.search(r"redisacc demo: the two results differ by \d\.\d\de-\d\d, more than 1.0e-03\n", found.stderr)
    assert "The results agree" not in found.stdout
    assert keys(real_client) == set()


def test_a_loss_that_does_not_fall_is_a_failure(text: Path) -> None:
    status, out, err = run("--text", text, *SMALL, "--steps", "1")
    assert status == 1
    assert without_waiting(err).startswith("redisacc demo: the loss did not fall: ")
    assert "The results agree" not in out


def test_a_terminal_gets_a_bar_of_its_width(text: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "redisacc", "demo", "--text", str(text), *SMALL, "--epochs", "3"]
        os.execve(sys.executable, command, os.environ | {"COLUMNS": "80", "LINES": "25", "TERM": "xterm"})
    written = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # how Linux reports the other end's end
                break
            if not chunk:
                break
            written += chunk
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()))
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if "━" in line]
    assert any(re.search(r"^2 workers ━.* step \d+/\d+  loss \d\.\d+ [\d,]+ gradients/s", line) for line in bars)
    assert any(line.startswith("one process ━") for line in bars)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--role", "worker"], "--role worker needs --redis"),
        (["--role", "chief"], "--role chief needs --redis"),
        (["--worker-index", "0"], "--worker-index needs --role worker"),
        (["--role", "worker", "--dim", "8", "--word", "x"], "give --dim, --word to the chief"),
        (["--run", "a{b}"], "use 1 to 64 letters, digits"),
        (["--run", ""], "use 1 to 64 letters, digits"),
        (["--run", "x" * 65], "use 1 to 64 letters, digits"),
        (["--workers", "0"], "--workers"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--subsampling", "nan"], "--subsampling"),
        (["--timeout", "nan"], "--timeout"),
        (["--text", "/nowhere"], "--text"),
    ],
)
def test_wrong_usage(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDISACC_URL", raising=False)
    found = CliRunner().invoke(demo, options)
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--redis", "redis://127.0.0.1:1"], "cannot use the server at redis://127.0.0.1:1: "),
        (["--redis", "http://x"], "--redis: Redis URL must specify one of"),
        (["--redis", "redis://:secret@127.0.0.1:1/0?db=1"], "at redis://127.0.0.1:1/0: "),
        (["--redis", "redis://:secret@127.0.0.1:1/0?x=1"], "--redis: "),
        (["--redis", "redis://127.0.0.1:1", "--word", "nosuchword"], "not in the vocabulary"),
    ],
)
def test_errors_at_the_start(options: list[str], message: str) -> None:
    found = CliRunner().invoke(demo, options)
    assert found.exit_code == 1
    assert message in found.stderr
    assert found.stderr.startswith("redisacc demo: ")
    assert "secret" not in found.output


@pytest.mark.parametrize(
    ("url", "command", "shown"),
    [
        ("redis://127.0.0.1:7000/0", "redis-cli -p 7000", "redis://127.0.0.1:7000/0"),
        ("redis://localhost", "redis-cli -p 6379", "redis://localhost"),
        ("redis://box:1/3", "redis-cli -h box -p 1 -n 3", "redis://box:1/3"),
        ("rediss://:pw@box", "redis-cli -h box -p 6379 --tls --askpass", "rediss://box"),
        ("redis://me:p%40@[::1]:5", "redis-cli -h ::1 -p 5 --user me --askpass", "redis://[::1]:5"),
        ("unix:///tmp/a%20b.sock", "redis-cli -s '/tmp/a b.sock'", "unix:///tmp/a%20b.sock"),
        ("unix://u:pw@/tmp/s?db=2", "redis-cli -s /tmp/s -n 2 --user u --askpass", "unix:///tmp/s"),
    ],
)
def test_addresses_are_shown_without_passwords(url: str, command: str, shown: str) -> None:
    assert _redis_cli(url) == command
    assert _without_password(url) == shown


def test_a_server_that_goes_away(text: Path, until: Any) -> None:
    with Server() as server:
        options = ("--text", text, *SMALL, "--run", "lost", "--epochs", "500")
        with running(*options, url=server.url) as process:
            client = redis.Redis.from_url(server.url)
            pid = worker_pid(client, "lost", 0, until)
            # While the chief waits in a take, it notices this within two seconds, else after half a minute of retries.
            until(lambda: client.exists("redisacc:{demo-lost/input}:takers"))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            client.close()
            _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert re.search(r"^redisacc demo: .*(worker-|no Redis server answers|the server failed)", err, re.MULTILINE)
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
