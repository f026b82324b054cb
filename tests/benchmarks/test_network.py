"""Tests of the benchmark between hosts: it refuses, builds, measures and cleans up. No time is judged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.selection import thorough
from support.until import until

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import environment, models  # noqa: E402
from benchmarks.crew import BenchmarkError  # noqa: E402
from benchmarks.environment import Run, default_server  # noqa: E402
from benchmarks.network import arrangements, cli, hosts  # noqa: E402
from benchmarks.network.crews import PEERS, Network, Redisacc, bare, host_names, parts, start  # noqa: E402
from benchmarks.network.hosts import Hosts, HostsError  # noqa: E402
from benchmarks.network.measure import memory_needed  # noqa: E402
from benchmarks.network.report import draw, render  # noqa: E402
from benchmarks.network.update_report import bars, choice, overlaps  # noqa: E402
from benchmarks.sections.rounds import compete  # noqa: E402
from benchmarks.workloads import TINY, Workload  # noqa: E402

pytestmark = pytest.mark.slow


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def own_namespaces(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"{hosts.PREFIX}-{pid}-")]


@pytest.fixture(scope="module")
def can_build() -> None:
    """Skips a test where hosts cannot be built: without root, without iproute2, or in most containers."""
    if reasons := hosts.obstacles():
        pytest.skip(" ".join(reasons))
    try:
        with Hosts(["try"], 1):
            pass
    except HostsError as error:
        pytest.skip(f"the system refuses network namespaces: {error}")


@pytest.fixture
def leftovers(can_build: None) -> Iterator[None]:
    """Keeps other tests from removing what earlier runs have left behind, for a test that does it or leaves some."""
    with (Path(tempfile.gettempdir()) / "redisacc-test-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def network(can_build: None, tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """Returns a function that makes a network of two workers for workloads."""
    run = Run(quick=True, tiny=True, tensorflow=None, torch=None, server=default_server(), directory=tmp_path)
    with Hosts(host_names(2), 1) as built, contextlib.ExitStack() as stack:

        def make(workloads: list[Workload], kind: str = "rounds", **settings: Any) -> Network:
            return Network(run, built, 2, kind, {**run.arrays(workloads, [2]), **settings}, stack)

        yield make


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "fast"],
        ["--workers", "1"],
        ["--workers", "3"],
        ["--workers", "many"],
        ["--only", "dense-5MB"],
        ["--peer", "nobody"],
    ],
)
def test_invalid_options_are_refused_by_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert arguments[0] in message
    assert arguments[1] in message


def test_without_root_nothing_is_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts, "_run", lambda *command: pytest.fail(f"ran {command}"))
    assert cli.main([]) == 2
    assert "needs root: run this with sudo" in capsys.readouterr().err


def test_without_iproute2_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert cli.main([]) == 2
    assert "Not on the PATH: ip, tc. Install iproute2" in capsys.readouterr().err


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hosts.obstacles() == ["Network namespaces exist only on Linux, and this is darwin."]


def test_a_refusal_of_the_kernel_is_quoted_and_leaves_nothing(can_build: None) -> None:
    # No rate is so high, so the first `tc` fails, when two namespaces exist.
    with pytest.raises(HostsError, match=r"`tc .*` failed: "), Hosts(["one"], float("inf")):
        pytest.fail("the hosts were built")
    assert not own_namespaces(os.getpid())


SENDER = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
server.accept()[0].sendall(bytes(10**6))
"""
RECEIVER = """
import socket, sys
print(len(socket.create_connection((sys.argv[1], 5000)).makefile("rb").read()))
"""


def test_results_are_added_to_those_of_an_earlier_run() -> None:
    before = {"gigabits": 1.0, "workers": 4, "rows": {"a": 1}, "updates": {"x": 1, "y": 1}}
    networks = [before, {"gigabits": 10.0, "workers": 4, "rows": {}}]
    cli._add(networks, {"gigabits": 1.0, "workers": 4, "rows": {}, "updates": {"y": 2}})
    cli._add(networks, {"gigabits": 1.0, "workers": 8, "rows": {}})
    assert networks[0] == {**before, "updates": {"x": 1, "y": 2}}
    assert [(one["gigabits"], one["workers"]) for one in networks] == [(1.0, 4), (10.0, 4), (1.0, 8)]
    run = {"when": "2026-11-24", "options": "--quick", "quick": True, "machine": {}, "networks": []}
    results = cli._continued(cli._continued({"when": "2026-11-23", "networks": networks}, run), run)
    assert (results["when"], results["networks"], len(results["added"])) == ("2026-11-23", networks, 2)


def test_the_page_is_what_its_results_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = ROOT / "benchmarks" / "results"
    monkeypatch.setattr("benchmarks.plots.paint_file", lambda _out, name, *_: f"{name}.svg")
    results = json.loads((folder / "network.json").read_text())
    page = render(results, draw(results, tmp_path))
    assert page == (folder / "network.md").read_text()
    conclusion = page.partition("\n## ")[0]
    assert len(re.findall(r"^- ", conclusion, re.MULTILINE)) <= 5
    assert re.findall(r"!\[.*?\]\((.*?)\)", conclusion) == ["network-conclusion.svg"]
    for name in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (folder / name).is_file()
    # A row says so if it misses its bar, and none is wider than a page.
    assert "missed** |" in page
    assert max(line.count("|") for line in page.splitlines()) <= 10


def measured(gigabits: float, workers: int, **seconds: float) -> dict[str, Any]:
    """Returns the results of a network on which these peers' steps took so many seconds."""
    peers = {key.replace("_", "-"): {"seconds": {"median": value}} for key, value in seconds.items()}
    return {"gigabits": gigabits, "workers": workers, "updates": {"updates-4MB": {"peers": peers}}}


def test_the_page_says_which_arrangement_to_choose() -> None:
    slow = measured(1, 4, tensorflow=0.4, bare=0.01, nodes=0.1, one=0.2, nodes_bfloat16=0.05, one_bfloat16=0.09)
    # Of all numbers of workers together, nodes are the faster ones.
    many = measured(1, 8, nodes=0.2, one=0.19)
    fast = measured(10, 4, gloo=0.03, nodes=0.06, one=0.05)
    assert choice([slow, many, fast, measured(10, 8, nodes=0.1)]) == [
        "- **At 1 Gbit/s, choose a node on each worker's host** for a training with an optimiser. Milliseconds a step "
        "of 4MB, 4 workers: float32 100 (one server 200, TensorFlow 400), bfloat16 50 (one server 90).",
        "- **At 10 Gbit/s, choose one server** for a training with an optimiser. Milliseconds a step of 4MB, 4 "
        "workers: float32 50 (gloo 30).",
    ]
    assert choice([measured(1, 4, nodes=0.1)]) == []


def test_the_page_says_how_much_of_an_upload_a_backward_pass_hides() -> None:
    medians = {"no-pass": 0.2, "after": 0.3, "streamed": 0.24}
    peers = {
        key: {"name": key, "seconds": {"median": value, "q1": value, "q3": value}} for key, value in medians.items()
    }
    section = {"peers": peers, "backward_seconds": 0.1}
    network = {"gigabits": 1, "workers": 2, "overlap": {"overlap-31MB": section}}
    assert [line.split(" | ")[-2:] for line in overlaps([network]).splitlines()[-3:]] == [
        ["1.00", " |"],
        ["1.50", " |"],
        ["1.20", "**1.15, missed** |"],
    ]
    assert bars([network]) == [False]
    peers["streamed"]["seconds"]["median"] = 0.23
    assert bars([network]) == [True]


def test_a_network_without_enough_memory_is_left_out(
    leftovers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "available_memory", lambda: 2**30)
    assert cli.main(["--rate", "1", "--workers", "32", "--out", str(tmp_path)]) == 0
    assert "left out: the processes need about" in capsys.readouterr().out
    assert "Not measured: 1 Gbit/s with 32 workers: the processes need" in (tmp_path / "network.md").read_text()


def test_more_workers_and_peers_need_more_memory() -> None:
    small = memory_needed(4, ["dense-4MB"], ["bare"])
    assert small > 6 * 4 * 4_000_000
    assert memory_needed(8, ["dense-4MB"], ["bare"]) > small
    assert memory_needed(4, ["dense-4MB"], ["bare", "tensorflow"]) > 2 * small
    # With 8 workers, all rows are measured by default, and with 16 only those that show growth.
    assert memory_needed(8, None, ["bare"]) > memory_needed(16, None, ["bare"])


def test_hosts_reach_each_other_and_nothing_else(can_build: None) -> None:
    with Hosts(["one", "two"], 0.5) as built:
        (switch,) = [name for name in own_namespaces(os.getpid()) if name.endswith("-switch")]
        queues = json.loads(subprocess.check_output(["tc", "-n", switch, "-j", "qdisc"]))
        host = json.loads(subprocess.check_output([*built.command("one"), "tc", "-j", "qdisc"]))
        limited = [queue for queue in [*queues, *host] if queue["kind"] == "tbf"]
        assert len(limited) == 3
        for queue in limited:
            # Bytes in a second, and microseconds.
            assert queue["options"]["rate"] == 0.5e9 / 8
            assert round(queue["options"]["lat"], -2) == hosts.QUEUE_MS * 1000
        routes = json.loads(subprocess.check_output([*built.command("one"), "ip", "-j", "route"]))
        assert [route["dst"] for route in routes] == ["10.77.0.0/24"]
        with subprocess.Popen([*built.command("two"), sys.executable, "-c", SENDER], stdout=subprocess.PIPE) as sender:
            assert sender.stdout is not None
            sender.stdout.readline()
            receiver = [*built.command("one"), sys.executable, "-c", RECEIVER, built.address("two")]
            assert int(subprocess.check_output(receiver)) == 10**6
        traffic = built.traffic()
        assert traffic["two"]["out"] > 10**6 < traffic["one"]["in"]
        assert traffic["one"]["out"] < 10**5
    assert not own_namespaces(os.getpid())


def test_leftovers_are_recognised_by_name(leftovers: None) -> None:
    def started(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]

    with subprocess.Popen(["sleep", "60"]) as dead:
        of_dead = f"{hosts.PREFIX}-{dead.pid}-{started(dead.pid)}-one"
        dead.kill()
    me = os.getpid()
    # The id of a process that ended may be that of another one now.
    of_predecessor = f"{hosts.PREFIX}-{me}-{int(started(me)) - 1}-one"
    of_living = f"{hosts.PREFIX}-{me}-{started(me)}-one"
    foreign = f"other-{dead.pid}-1-one"
    names = [of_dead, of_predecessor, of_living, foreign]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        with subprocess.Popen(["ip", "netns", "exec", of_dead, "sleep", "60"]) as inside:
            # The process is in the namespace as soon as `ip` has replaced itself.
            until(lambda: "sleep" in Path(f"/proc/{inside.pid}/comm").read_text())
            assert {of_dead, of_predecessor} <= set(hosts.remove_leftovers())
            assert inside.wait(10) == -signal.SIGKILL
        assert {of_living, foreign} == set(names) & set(namespaces())
    finally:
        for name in set(names) & set(namespaces()):
            subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.parametrize("number", thorough([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], usual=[signal.SIGKILL]))
def test_a_run_that_is_ended_leaves_no_hosts(number: signal.Signals, leftovers: None, tmp_path: Path) -> None:
    # At this rate a round takes two seconds, so the run ends in the middle of one.
    options = ["--quick", "--rate", "0.05", "--workers", "2", "--only", "dense-4MB", "--peer", "bare"]
    command = [sys.executable, "-m", "benchmarks.network", *options, "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:

        def servers() -> list[int]:
            assert running.poll() is None
            found = []
            for name in own_namespaces(running.pid):
                if name.endswith("-server"):
                    for pid in subprocess.check_output(["ip", "netns", "pids", name], text=True).split():
                        with contextlib.suppress(OSError):
                            if "valkey" in Path(f"/proc/{pid}/comm").read_text():
                                found.append(int(pid))
            return found

        server = until(servers, 100)[-1]
        own = own_namespaces(running.pid)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
        assert set(own) <= set(hosts.remove_leftovers())
    else:
        assert running.returncode == 130
        assert "interrupted" in errors
    assert not set(own) & set(namespaces())
    # It may wait for its parent to collect it, but runs no more.
    with contextlib.suppress(OSError):
        assert Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.thorough
def test_rounds_between_hosts(network: Callable[..., Network], tmp_path: Path) -> None:
    here = network(TINY)
    told = tmp_path / "told"
    beside = ("-c", f"import signal; open({str(told)!r}, 'w').write('{{url}}'); signal.pause()")
    peers = [
        Redisacc("redisacc", beside=beside)(here, "redisacc"),
        bare(here, "bare"),
        parts(here, "bare-reducer"),
    ]
    assert peers[0] is not None
    # The server's process and the one beside it.
    assert len(peers[0].server_pids) == 2
    rows = compete(peers, TINY, 4, 100.0, 1, block=2, memory=True)
    assert told.read_text().startswith("unix://")
    for workload in TINY:
        row = rows[workload.name]
        # Only dense gradients can be added piece by piece.
        assert set(row["peers"]) == {"redisacc", "bare"} | ({"bare-reducer"} if workload.kind == "dense" else set())
        for peer in row["peers"].values():
            assert len(peer["rounds"]) == 4
            assert peer["totals_a_round"]["server_in"] > 2 * workload.bytes
            assert peer["totals_a_round"]["taker_in"] > workload.bytes
            assert peer["totals_a_round"]["dropped"] == 0
            assert peer["peak_memory"]["server"] > 10**6
    results: dict[str, Any] = {
        "when": "2000-01-01",
        "seconds": 1,
        "machine": {"cpu": "x", "cores": 1, "memory_bytes": None, "system": "y", "load_before": 0.0},
        "versions": {"python": "3"},
        "quick": True,
        "options": "--tiny",
        "queue_ms": 20,
        "left_out": [],
        "networks": [
            {
                "gigabits": 1,
                "workers": 2,
                "congestion_control": "cubic",
                "rows": rows,
                "names": {peer.key: peer.crew.name for peer in peers},
                "versions": here.versions,
            }
        ],
    }
    page = render(results, {})
    assert "A quick run with few rounds" in page
    assert re.search(r"^\| tiny-dense \| [^|]+ \| 2 \|", page, re.MULTILINE)
    assert "Options of this run: `--tiny`" in page


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("key", ["bare", "nodes", "one", "after", "streamed"])
def test_steps_between_hosts_are_checked(
    key: str, damaged: bool, network: Callable[..., Network], tmp_path: Path
) -> None:
    model = models.even(3, 300_000)
    models.write(tmp_path / "models", [model], 2)
    if damaged:
        np.savez(tmp_path / "models" / model.name / "mean-1.npz", **dict.fromkeys(model.weights(), np.zeros(1)))
    here = network([], "updates", arrays=str(tmp_path / "models"), model=model.name, backward=0.01)
    peer = {**arrangements.PEERS, **arrangements.OVERLAPPING}[key](here, key)
    assert peer is not None
    for _ in range(2):
        # The weights of the step before are compared.
        peer.crew.round("", repeat=1)
    with pytest.raises(BenchmarkError, match="wrong values") if damaged else contextlib.nullcontext():
        peer.crew.round("", repeat=3)


@pytest.mark.parametrize(("tolerance", "passes"), thorough([(0.0, False), (0.1, True)], usual=[(0.0, False)]))
def test_results_may_differ_by_the_tolerance(
    tolerance: float, passes: bool, network: Callable[..., Network], tmp_path: Path
) -> None:
    here = network(TINY[1:])
    path = Path(here.settings["arrays"]) / TINY[1].name / "expected-2-0.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["mean"].flat[-1] += 1 / 64
    np.savez(path, **arrays)
    peer = Redisacc("redisacc", options={"once_per_worker": True}, tolerance=tolerance)(here, "redisacc")
    with contextlib.nullcontext() if passes else pytest.raises(BenchmarkError, match="wrong values"):
        peer.crew.round(TINY[1].name)


@pytest.mark.thorough
@pytest.mark.parametrize(("key", "share"), [("redisacc-bfloat16", 1 / 2), ("redisacc-int8", 1 / 4)])
def test_encoded_gradients_are_checked_and_send_fewer_bytes(
    key: str, share: float, network: Callable[..., Network]
) -> None:
    workload = Workload("encoded", "dense", (300, 300))
    peer = PEERS[key](network([workload]), key)
    assert peer is not None
    assert not peer.takes_part(TINY[0])
    before = peer.totals()["server_in"]
    for _ in range(2):
        peer.crew.round(workload.name)
    gradients = 2 * 2 * workload.bytes
    assert 1 < (peer.totals()["server_in"] - before) / (gradients * share) < 1.5


@pytest.mark.thorough
def test_a_reducer_runs_beside_the_server(network: Callable[..., Network]) -> None:
    workload = Workload("reduced", "dense", (1000, 500))
    peer = PEERS["redisacc-reducer"](network([workload]), "redisacc-reducer")
    assert peer is not None
    # The server's process and the reducer's.
    assert len(peer.server_pids) == 2
    for _ in range(3):
        peer.crew.round(workload.name)


@pytest.mark.thorough
def test_weights_are_measured_only_where_they_differ(network: Callable[..., Network]) -> None:
    here = network([Workload("tiny-weights", "dense", (5, 3))], "weights")
    keys = ["redisacc-reducer", "redisacc-int8", "redisacc-bfloat16", "bare-reducer", "tensorflow", "gloo"]
    # There is no environment with TensorFlow or torch here.
    assert [peer.key for peer in start(here, keys)] == ["redisacc-bfloat16"]


@pytest.mark.thorough
def test_options_reach_the_accumulator(network: Callable[..., Network]) -> None:
    peer = Redisacc("redisacc", options={"no_such_option": 1})(network(TINY[1:]), "redisacc")
    with pytest.raises(BenchmarkError, match="no_such_option"):
        peer.crew.round(TINY[1].name)


@pytest.mark.parametrize("key", thorough(["redisacc", "redisacc-bfloat16", "bare"], usual=["redisacc"]))
def test_weights_reach_every_worker(key: str, network: Callable[..., Network]) -> None:
    workload = Workload("tiny-weights", "dense", (5, 3))
    here = network([workload], "weights")
    (peer,) = start(here, [key])
    for _ in range(3):
        timing = peer.crew.round(workload.name)
        # The publisher and two readers.
        assert len(timing.applies) == 3
        assert peer.time(timing) == timing.finished
