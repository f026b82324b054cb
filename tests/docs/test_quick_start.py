"""The quick start's training run, as typed, with the kills and restarts that it describes."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from pages import DOCS

PAGE = DOCS / "start" / "quick-start.md"

_RUN = "$ redisacc run "
_STEP = re.compile(r"^worker 0 \| (step \d+: .*)$", re.MULTILINE)
_STARTED = re.compile(r"process (\d+) started .* as process (\d+);")
_WORKER = re.compile(r"worker (\d) is process (\d+)")
# The lines of the program that the reader would write without redisacc, too.
_OF_THE_MODEL = 14


def _blocks(language):
    if not PAGE.is_file():
        pytest.skip("the documentation isn't part of an installation")
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks():
    return _blocks("python")


@pytest.fixture
def run_as_typed(tmp_path, blocks):
    """Starts the quick start's run, as a process of its own; returns it and the file to which it writes."""
    [line] = {line for block in _blocks("console") for line in block.splitlines() if line.startswith(_RUN)}
    # What the reader's PATH would find.
    python = shlex.quote(sys.executable)
    arguments = line[2:].replace(" python ", f" {python} ").replace("redisacc", f"exec {python} -m redisacc", 1)
    program = next(block for block in blocks if block.startswith("# train.py"))
    # As the reader has it, but for the time in which a larger model would compute.
    assert "time.sleep(0.1)" in program
    (tmp_path / "train.py").write_text(program.replace("time.sleep(0.1)", "time.sleep(0.02)"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REDISACC_")}
    runs = []

    def start(*replaced):
        command = arguments.replace(*replaced) if replaced else arguments
        out = tmp_path / f"run-{len(runs)}"
        with out.open("wb") as file:
            run = subprocess.Popen(command, shell=True, cwd=tmp_path, env=environment, stdout=file, stderr=file)
        runs.append(run)
        return run, out

    yield start
    for run in runs:
        # Its guard ends whatever it has started.
        with contextlib.suppress(ProcessLookupError):
            run.kill()
        run.wait()


def _wait_for(text, run, out):
    deadline = time.monotonic() + 60
    while text not in out.read_text():
        assert run.poll() is None, out.read_text()
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.02)


def _without_numbers(text):
    """Returns lines without what differs from run to run: processes, ports, versions, and the order of workers.

    The loss depends on the edition of the text, so only its first digit stays.
    """
    text = re.sub(r"process \d+", "process N", text)
    text = re.sub(r"(loss \d)\.\d+", r"\1", text)
    # A reader kills later than a test, when there is no pause.
    text = re.sub(r"(it restarts) in [\d.]+ s", r"\1", text)
    text = re.sub(r"(?:Valkey|Redis) \S+( as .*):\d+/0", r"SERVER\1", text)
    lines = [line for line in text.splitlines() if not line.startswith("$ ")]
    return sorted(line for line in lines if "is process" in line) + [line for line in lines if "is process" not in line]


def _processes_in(folder):
    """Returns the processes whose working directory this is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").resolve(strict=True) == folder:
                found.append(int(entry.name))
    return found


def _url(output):
    """Returns the URL of the server that a run has started."""
    [url] = re.findall(r"ready at (\S+)", output)
    return url


def _redisacc(url, command):
    """Runs a command of the page, as typed, and returns its output."""
    words = [sys.executable, "-m", *shlex.split(command)]
    return subprocess.run(
        words, env={**os.environ, "REDISACC_URL": url}, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_run_survives_what_the_page_does_to_it(run_as_typed, tmp_path):
    consoles = _blocks("console")
    at = next(n for n, block in enumerate(consoles) if block.startswith(_RUN))
    first_run, kill_worker, after_death, kill_all, second_run = consoles[at : at + 5]
    [(run_pid, server_pid)] = _STARTED.findall(first_run)
    # Each number that the reader types is one that the output names.
    assert kill_worker == f"$ kill -9 {dict(_WORKER.findall(first_run))['0']}\n"
    assert kill_all == f"$ kill -9 {run_pid} {server_pid}\n"
    undisturbed, expected = run_as_typed("--server-dir data", "--server-dir undisturbed")

    run, out = run_as_typed()
    _wait_for("step 100:", run, out)
    os.kill(int(dict(_WORKER.findall(out.read_text()))["0"]), signal.SIGKILL)
    _wait_for("step 150:", run, out)
    [(run_pid, server_pid)] = _STARTED.findall(out.read_text())
    assert int(run_pid) == run.pid
    # The server alone is started again. What it has lost of the last seconds, the workers have.
    os.kill(int(server_pid), signal.SIGKILL)
    _wait_for("the server has restarted", run, out)
    server_pid = re.findall(r"the server has restarted as process (\d+)", out.read_text())[0]
    os.kill(run.pid, signal.SIGKILL)
    os.kill(int(server_pid), signal.SIGKILL)
    run.wait()
    assert undisturbed.wait(120) == 0, expected.read_text()
    deadline = time.monotonic() + 60
    while left := _processes_in(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    first = out.read_text()
    run, out = run_as_typed()
    assert run.wait(120) == 0, out.read_text()
    second = out.read_text()

    # However it was disturbed, it prints what an undisturbed one prints. A worker that was killed in the middle of a
    # step prints that step again, and the steps of two seconds may be computed again.
    steps = _STEP.findall(first) + _STEP.findall(second)
    assert sorted(set(steps), key=steps.index) == _STEP.findall(expected.read_text())
    assert [step.partition(":")[0] for step in dict.fromkeys(steps)] == [f"step {n}" for n in range(0, 300, 50)]
    for output, pages in ((first, [first_run, after_death]), (second, [second_run])):
        lines = dict.fromkeys(line for line in _without_numbers(output) if "the server" not in line)
        again = [line for line in lines if "step" in line and line not in _without_numbers("".join(pages))]
        # Only steps that were printed before.
        assert all(line in _without_numbers(first) for line in again)
        assert [line for line in lines if line not in again] == list(dict.fromkeys(_without_numbers("".join(pages))))

    run, out = run_as_typed()
    assert run.wait(60) == 0, out.read_text()
    assert not _STEP.findall(out.read_text())
    # The commands that look inside, with the URL that the run has printed.
    looks = next(block for block in consoles if "$ redisacc watch" in block)
    assert looks.startswith(f"$ export REDISACC_URL={_url(first_run)}\n")


def test_twelve_lines_of_the_quick_start_are_not_the_models(blocks):
    program = next(block for block in blocks if block.startswith("# train.py"))
    lines = [line for line in program.splitlines() if line and not line.startswith("#")]
    assert "Fourteen of its lines are the model and its data" in PAGE.read_text()
    assert len(lines) - _OF_THE_MODEL <= 12


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_what_the_page_says_about_a_run_that_is_done_and_about_looking_inside(run_as_typed, tmp_path):
    consoles = _blocks("console")
    run, out = run_as_typed()
    assert run.wait(120) == 0, out.read_text()
    program = tmp_path / "train.py"
    program.write_text(program.read_text().replace("until=300", "until=2000"))
    run, out = run_as_typed()
    _wait_for("step 350:", run, out)
    assert _STEP.findall(out.read_text())[0].startswith("step 300:")
    looks = next(block for block in consoles if "$ redisacc watch" in block)
    show, watch = re.findall(r"^\$ (redisacc (?:show|watch)\b[^#]*)", looks, re.MULTILINE)
    shown = _redisacc(_url(out.read_text()), show)
    assert all(f"worker {number}" in shown for number in range(3))
    assert "quickstart  step " in _redisacc(_url(out.read_text()), f"{watch} --number 1")

    run, out = run_as_typed("--server-dir data", "--server-dir another")
    _wait_for("step 0:", run, out)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_killed_server_that_is_not_durable_loses_what_came_after_its_last_snapshot(
    run_as_typed,
):
    run, out = run_as_typed("--server-dir data", "--server-dir data --no-durable")
    _wait_for("step 50:", run, out)
    [(_, server_pid)] = _STARTED.findall(out.read_text())
    os.kill(run.pid, signal.SIGKILL)
    os.kill(int(server_pid), signal.SIGKILL)
    run.wait()
    run, out = run_as_typed("--server-dir data", "--server-dir data --no-durable")
    _wait_for("step 0:", run, out)
    # A server that is stopped loses nothing.
    _wait_for("step 50:", run, out)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    run, out = run_as_typed("--server-dir data", "--server-dir data --no-durable")
    _wait_for("step 100:", run, out)
    assert "step 0:" not in out.read_text()


def test_every_extra_is_described():
    _blocks("python")
    text = (DOCS.parent / "pyproject.toml").read_text().partition("# The rest is for developers.")[0]
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    install = PAGE.read_text().partition("## Installation")[2].partition("\n## ")[0]
    assert [extra for extra in extras if f"`{extra}`" not in install] == []
