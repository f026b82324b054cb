"""`redisacc run` with real processes: their environment, exit codes, deaths and restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.selection import thorough
from support.until import until

from redisacc import place
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import Run, gpus_of, places

pytestmark = [
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

# What every script begins with.
HEAD = """
import os, pathlib, signal, subprocess, sys, time
chief = os.environ["REDISACC_ROLE"] == "chief"
number = int(os.environ.get("REDISACC_WORKER_NUMBER", -1))
"""

# The chief ends when the file `finish` is there, and so do the workers.
UNTIL_FINISHED = (
    HEAD
    + """
print("pid", os.getpid(), "id", os.environ["REDISACC_RUN_ID"])
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
"""
)


# The environment


def environments(run):
    assert run.code() == 0, run.err
    lines = [re.fullmatch(r"(.+?) +\| (\{.*)", line) for line in run.out.splitlines()]
    return {line[1]: json.loads(line[2]) for line in lines}


ENVIRONMENT = HEAD + "import json; print(json.dumps(dict(os.environ)))"


def test_what_each_process_finds_in_its_environment(start, real_server):
    odd = {"REDISACC_WORKER_NUMBER": "77", "A.B%%": "kept", "PYTHONUNBUFFERED": ""}
    found = environments(start("--chief", "--workers", 2, script=ENVIRONMENT, **odd))
    assert sorted(found) == ["chief", "worker 0", "worker 1"]
    places = {name: place(environment) for name, environment in found.items()}
    assert {name: str(where) for name, where in places.items()} == {name: name for name in found}
    assert {where.workers for where in places.values()} == {2}
    assert len({where.run_id for where in places.values()} - {None}) == 3
    chief = places.pop("chief")
    assert chief.chief_run_id is None
    assert {where.chief_run_id for where in places.values()} == {chief.run_id}
    for environment in found.values():
        assert environment["REDISACC_URL"] == real_server.url
        assert environment["A.B%%"] == "kept"
        assert environment["PYTHONUNBUFFERED"] == ""


def test_what_libraries_find_that_torchrun_starts(start):
    options = ("--chief", "--workers", 3, "--first-worker", 1, "--total-workers", 5, "--gpus", 2, "--ranks")
    found = environments(start(*options, script=ENVIRONMENT, RANK="9", CUDA_VISIBLE_DEVICES="4,7"))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert {name: [environment.get(each) for each in names] for name, environment in found.items()} == {
        "chief": [None, None, None, None, ""],
        "worker 1": ["1", "0", "5", "3", "4"],
        "worker 2": ["2", "1", "5", "3", "7"],
        "worker 3": ["3", "2", "5", "3", "4"],
    }


def test_each_worker_may_have_several_gpus():
    assert [gpus_of((worker, 2), 5, "") for worker in range(2)] == ["0,2,4", "1,3"]
    assert gpus_of((3, 4), 2, "") == "1"


def test_a_worker_that_ends_early_is_mentioned(tmp_path, durations):
    durations(report=0.1)
    said = []

    class Told(Run):
        def say(self, text):
            said.append(text)
            (tmp_path / "finish").touch()

    script = HEAD + f"while number and not pathlib.Path({str(tmp_path / 'finish')!r}).exists(): time.sleep(0.01)"
    members = places(chief=False, workers=3, first_worker=0, total_workers=3)
    assert Told(members, [sys.executable, "-c", script], os.environ, restarts=lambda: Restarts(0), grace=10).wait() == 0
    # One of the others may have ended a while before the last one.
    assert said[0] == "worker 0 ended with exit code 0, which is final. Still there: worker 1, worker 2"


MACHINES = [
    (("--workers", 2), ["worker 0", "worker 1"], 2),
    (("--workers", 2, "--first-worker", 3), ["worker 3", "worker 4"], None),
    (("--workers", 1, "--first-worker", 3, "--total-workers", 4), ["worker 3"], 4),
    (("--chief", "--workers", 1, "--total-workers", 9), ["chief", "worker 0"], 9),
    (("--workers", 2, "--first-worker", 1, "--server"), ["worker 1", "worker 2"], 3),
    (("--chief", "--workers", 1, "--first-worker", 2), ["chief", "worker 2"], 3),
    (("--chief", "--workers", 0), ["chief"], None),
]


# The others are parts of the third.
@pytest.mark.parametrize(("options", "names", "total"), thorough(MACHINES, usual=[MACHINES[2], *MACHINES[4:]]))
def test_machines_have_different_workers(start, options, names, total):
    found = environments(start(*options, script=ENVIRONMENT))
    assert sorted(found) == names
    assert {place(environment).workers for environment in found.values()} == {total}


def test_without_a_server_in_the_environment_the_default_is_handed_on(start, real_server):
    found = environments(
        start("--chief", "--workers", 0, "--redis", real_server.url, script=ENVIRONMENT, REDISACC_URL="")
    )
    assert found["chief"]["REDISACC_URL"] == real_server.url
    assert found["chief"]["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("dashes", [["--"], []])
def test_arguments_of_the_program_are_untouched(start, dashes):
    words = ["--workers", "7", "--", "-h", "--server", "ä \n", ""]
    code = "import sys; print(ascii(sys.argv[1:]))"
    run = start("--chief", "--workers", 0, *dashes, sys.executable, "-c", code, *words)
    assert run.code() == 0
    assert run.out == f"chief    | {words!a}\n"


# Exit codes


ENDS = [
    (("--chief",), "sys.exit(0)", 0),
    (("--chief",), "sys.exit(3 if chief else 0)", 3),
    (("--chief",), "os.kill(os.getpid(), signal.SIGKILL) if chief else None", 137),
    (("--chief",), "sys.exit(0 if chief else 4) if not chief else signal.pause()", 4),
    ((), "sys.exit(0)", 0),
    ((), "sys.exit(5) if number == 1 else signal.pause()", 5),
    ((), "time.sleep(0.5 * number)", 0),
]


@pytest.mark.parametrize(
    ("options", "script", "code"),
    thorough(ENDS, usual=ENDS[1:3]),
)
def test_exit_code(start, options, script, code):
    run = start("--workers", 2, "--restarts", 0, *options, script=HEAD + script)
    assert run.code() == code
    assert bool(run.err) == (code != 0)


def test_a_worker_that_has_finished_is_not_started_again(start):
    run = start("--chief", "--workers", 1, script=UNTIL_FINISHED.replace("while", "while chief and"))
    run.seen("pid", 2)
    until(lambda: len(run.left()) == 2)  # the chief and the guard
    (start.folder / "finish").touch()
    assert run.code() == 0
    assert run.out.count("worker 0 |") == 1


def test_workers_may_end_by_themselves_after_the_chief(start):
    script = HEAD + (
        "if chief: pathlib.Path('chief').write_text(str(os.getpid())); sys.exit()\n"
        "while not pathlib.Path('finish').exists(): time.sleep(0.01)\n"
        "print('done'); sys.exit(7)"
    )
    run = start("--chief", "--workers", 2, script=script)
    told = start.folder / "chief"
    chief = until(lambda: told.exists() and told.read_text())
    # The run knows that it has ended, and the workers and the guard are there.
    until(lambda: not Path(f"/proc/{chief}").exists())
    until(lambda: len(run.left()) == 3)
    (start.folder / "finish").touch()
    # A worker that fails now has no say any more.
    assert run.code() == 0
    assert sorted(run.out.splitlines()) == ["worker 0 | done", "worker 1 | done"]
    assert run.err == ""


def test_workers_that_go_on_after_the_chief_are_stopped_and_then_killed(start):
    script = HEAD + (
        "def stop(*_): print('no'); sys.exit() if number == 0 else None\n"
        "signal.signal(signal.SIGTERM, stop); print('ready')\n"
        "while not (chief and pathlib.Path('finish').exists()): time.sleep(0.01)"
    )
    run = start("--chief", "--workers", 2, "--grace", "2", script=script)
    run.seen("ready", 3)
    (start.folder / "finish").touch()
    assert run.code() == 0
    assert sorted(run.out.splitlines()[3:]) == ["worker 0 | no", "worker 1 | no"]
    assert run.err == ("redisacc | 2 s after the end of the chief, still running and stopped: worker 0, worker 1\n")


# Deaths


@pytest.mark.parametrize("who", ["chief", "worker 1"])
def test_killed_process_is_started_again(start, who):
    run = start("--chief", "--workers", 2, script=UNTIL_FINISHED)
    pattern = r"(?m)^(\S.*?) +\| pid (\d+) id (\w+)$"
    found = {name: (int(pid), run_id) for name, pid, run_id in run.seen(pattern, 3)}
    os.kill(found[who][0], signal.SIGKILL)
    name, pid, run_id = run.seen(pattern, 4)[-1]
    assert name == who
    assert int(pid) != found[who][0]
    assert run_id == found[who][1]
    (start.folder / "finish").touch()
    assert run.code() == 0
    assert run.err == f"redisacc | {who} was killed by SIGKILL; it restarts in 0.5 s\n"


@pytest.mark.parametrize(
    ("options", "code"), [((), 2), ((), 78), (("--give-up-on", 9, "--give-up-on", 7), 7), (("--restarts", 0), 127)]
)
def test_an_error_that_would_come_again_ends_the_run(start, options, code):
    script = HEAD + f"if number != 0: signal.pause()\nprint('started'); sys.exit({code})"
    run = start("--chief", "--workers", 2, *options, script=script)
    assert run.code() == code
    assert run.out == "worker 0 | started\n"
    assert run.err == (
        f"redisacc | worker 0 ended with exit code {code}: it would fail again, so it is not restarted "
        "(--give-up-on), and the run ends. Its output above may say why\n"
    )


def test_other_exit_codes_may_end_the_run_instead(start):
    script = HEAD + "if number != 0: signal.pause()\nsys.exit(2)"
    run = start("--chief", "--workers", 1, "--restarts", 1, "--give-up-on", 3, script=script)
    assert run.code() == 2
    assert "exit code 2, failure number 2 within an hour; the run ends with exit code 2" in run.err


def test_crash_loop_is_given_up(start):
    script = HEAD + "print('started')\nif number != 0: signal.pause()\nprint('bang', file=sys.stderr); sys.exit(9)"
    run = start("--chief", "--workers", 2, "--restarts", 2, script=script)
    assert run.code() == 9
    assert run.out.count("worker 0 | started") == 3
    assert run.err.splitlines() == [
        "worker 0 | bang",
        "redisacc | worker 0 ended with exit code 9; it restarts in 0.5 s",
        "worker 0 | bang",
        "redisacc | worker 0 ended with exit code 9; it restarts in 1 s",
        "worker 0 | bang",
        "redisacc | worker 0 ended with exit code 9, failure number 3 within an hour; the run ends with exit code 9. "
        "Its output above may say why. --restarts allows more failures",
    ]


@pytest.mark.thorough
def test_children_of_a_dead_process_end_before_its_successor_begins(start):
    script = UNTIL_FINISHED.replace(
        "print", "child = subprocess.Popen(['sleep', '1000']); print(child.pid, end=' ')\nprint"
    )
    run = start("--chief", "--workers", 0, script=script)
    child, pid = map(int, run.seen(r"(\d+) pid (\d+)")[0])
    os.kill(pid, signal.SIGKILL)
    run.seen("pid", 2)
    assert child not in run.left()
    (start.folder / "finish").touch()
    # Those of a process that has finished end as well.
    assert run.code() == 0


@pytest.mark.thorough
def test_child_gets_sigterm_first_and_is_killed_if_it_ignores_it(start):
    child = "import signal; signal.signal(15, lambda *_: print('no')); print('deaf')\nwhile 1: signal.pause()"
    script = HEAD + (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); os.dup2(child.stdout.fileno(), 0)\n"
        # A further child, in a session of its own, reads what the first one writes after its parent has ended.
        "subprocess.Popen('read line; echo $line > said', shell=True, start_new_session=True)"
    )
    run = start("--chief", "--workers", 0, script=script)
    assert run.code() == 0
    assert (start.folder / "said").read_text() == "no\n"


def test_program_that_vanishes(start):
    program = start.folder / "program"
    program.write_text("#!/bin/sh\necho ready\nrm program\nexit 1\n")
    program.chmod(0o755)
    run = start("--chief", "--workers", 0, "./program")
    assert run.code() == 127
    assert run.err == (
        "redisacc | chief ended with exit code 1; it restarts in 0.5 s\n"
        "redisacc: cannot start chief: No such file or directory\n"
    )


# Usage


USAGE = [
    (["--workers", "1"], 2, "Missing argument"),
    (["--workers", "1", "--"], 2, "Missing argument"),
    (["python"], 2, "Missing option '--workers'"),
    (["--workers", "-1", "true"], 2, "-1 is not in the range"),
    (["--workers", "257", "true"], 2, "257 is not in the range 0<=x<=256"),
    (["--workers", "9" * 5000, "true"], 2, "'--workers'"),
    (["--workers", "1.5", "true"], 2, "'--workers'"),
    (
        ["--workers", "0", "true"],
        2,
        "there is nothing to run: give at least one worker, or --chief",
    ),
    (["--workers", "3", "--total-workers", "2", "true"], 2, "the last worker here has the number 2"),
    (["--workers", "2", "--first-worker", "999999", "true"], 2, "too large for 1000000 workers"),
    (["--workers", "1", "--server", "--redis", "redis://x", "true"], 2, "give --redis or --server, not both"),
    (["--workers", "1", "--grace", "nan", "true"], 2, "'--grace'"),
    (["--workers", "1", "--restarts", "-1", "true"], 2, "'--restarts'"),
    (["--workers", "1", "no-such-program"], 127, "'no-such-program' is not a program on the PATH"),
    (["--workers", "1", ""], 127, "'' is not a program on the PATH"),
    (["--workers", "1", "./no"], 127, "'./no' does not exist"),
    (["--workers", "1", "x\x1b[2J"], 127, r"'x\x1b[2J' is not a program on the PATH"),
    (["--workers", "1", "./data"], 126, "'./data' is not executable"),
    (["--workers", "1", "./folder"], 126, "'./folder' is a directory"),
    (["--workers", "1", "train.py"], 127, "to run it with Python: python train.py"),
    (["--workers", "1", "./train.py"], 126, "to run it with Python: python ./train.py"),
    (["--workers", "1", "./foreign"], 126, "cannot start worker 0: Exec format error"),
    (["--workers", "1", "./no-interpreter"], 127, "cannot start worker 0: No such file"),
    (["--workers", "1", "--redis", "redis://127.0.0.1:1", "true"], 6, "127.0.0.1:1"),
    (["--workers", "1", "--redis", "http://x", "true"], 2, "a URL must begin with"),
]


@pytest.mark.parametrize(("words", "code", "message"), thorough(USAGE, usual=USAGE[::10]), ids=range(len(USAGE)))
def test_wrong_usage(start, words, code, message):
    (start.folder / "folder").mkdir()
    for name, text, mode in [
        ("data", "", 0o644),
        ("train.py", "", 0o644),
        ("foreign", "\x7fELF", 0o755),
        ("no-interpreter", "#!/no/such/interpreter\n", 0o755),
    ]:
        (start.folder / name).write_text(text)
        (start.folder / name).chmod(mode)
    run = start(*words)
    assert run.code() == code
    assert message in " ".join(run.err.split())
    assert "\x1b" not in run.err
    assert "Traceback" not in run.err
    assert len(run.err) < 2000
    assert run.out == ""
