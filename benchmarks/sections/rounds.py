"""Measures the six rows next to TensorFlow's parameter server, and the same rounds with the alternatives."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from benchmarks import workloads
from benchmarks.crew import Crew, Timing, free_ports
from benchmarks.environment import Run, cpu_seconds, peak_memory, reset_peak_memory
from benchmarks.stats import ratio, summary
from benchmarks.workloads import Workload
from redisacc.embedded import Server


@dataclass
class Peer:
    """A crew, and the processes whose CPU time counts as the server's."""

    key: str
    crew: Crew
    server_pids: list[int]
    takes_part: Callable[[Workload], bool] = lambda _: True
    # Returns growing totals, such as bytes on a link; their growth in a round becomes part of the results.
    totals: Callable[[], dict[str, float]] = dict
    # Which time of a round counts, in seconds.
    time: Callable[[Timing], float] = lambda timing: timing.elapsed


def crew_at(
    run: Run,
    stack: contextlib.ExitStack,
    settings: dict[str, Any],
    server: Server,
    *,
    name: str,
    program: str = "redisacc_peer",
    workers: int | None = None,
) -> Crew:
    """Starts a crew in this project's environment that uses one of our servers.

    Args:
        run: the run.
        stack: ends the crew.
        settings: settings of every process.
        server: the server.
        name: name of the peer in the report.
        program: its program in ``peers/``, without ``.py``.
        workers: number of workers; None: the run's.
    """
    crew = Crew(
        name,
        sys.executable,
        program,
        workers=workers or run.workers,
        settings={**settings, "url": server.url},
        directory=run.directory,
    )
    stack.callback(crew.end)
    return crew


def redisacc_crew(
    run: Run,
    stack: contextlib.ExitStack,
    settings: dict[str, Any],
    section: str,
    *,
    persistent: bool,
    durable: bool = False,
    bfloat16: bool = False,
) -> Peer:
    """Starts redisacc on a server of its own. With bfloat16 on the wire, it takes part in dense rounds only."""
    label = "durable" if durable else "as embedded" if persistent else "nothing on disk"
    key = "redisacc-durable" if durable else "redisacc" if persistent else "redisacc-memory"
    if bfloat16:
        # Elements of rounds are below 16.
        settings = {**settings, "options": {"encoding": "bfloat16"}, "tolerance": 16 / 2**9}
        label, key = f"bfloat16, {label}", f"{key}-bfloat16"
    server, _ = stack.enter_context(run.start_server(f"{section}, {label}", persistent=persistent, durable=durable))
    crew = crew_at(run, stack, settings, server, name=f"redisacc, {label}")
    return Peer(key, crew, [server.pid], takes_part=lambda row: row.kind == "dense" or not bfloat16)


def bare_crew(run: Run, stack: contextlib.ExitStack, settings: dict[str, Any], section: str) -> Peer:
    """Starts bare sockets that do the same transfers and additions, through a server that writes nothing to disk."""
    server, _ = stack.enter_context(run.start_server(f"{section}, bare sockets", persistent=False))
    crew = crew_at(run, stack, settings, server, name="bare sockets", program="bare_round")
    return Peer("bare", crew, [server.pid])


def tensorflow_crew(run: Run, stack: contextlib.ExitStack, settings: dict[str, Any]) -> Peer:
    """Starts TensorFlow over gRPC, with one process for the parameter server, each worker, and the taker."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(run.workers + 2)]
    cluster = {"ps": ports[:1], "taker": ports[1:2], "worker": ports[2:]}
    assert run.tensorflow is not None
    crew = Crew(
        "TensorFlow, gRPC",
        run.tensorflow,
        "tensorflow_grpc",
        workers=run.workers,
        settings={**settings, "cluster": cluster},
        directory=run.directory,
        helpers=("ps",),
    )
    stack.callback(crew.end)
    return Peer("tensorflow", crew, crew.helper_pids)


def compete(
    peers: list[Peer],
    rows: list[Workload],
    rounds: int,
    budget: float,
    warm_up: int,
    *,
    block: int = 1,
    memory: bool = False,
) -> dict[str, Any]:
    """Runs rounds of several peers in alternation (A B C, A B C, …) for each row.

    Args:
        peers: the peers; the others are compared with the first.
        rows: the workloads.
        rounds: number of rounds for each peer.
        budget: seconds after which a slow peer leaves a row, but not before 3 rounds.
        warm_up: number of rounds before those that count.
        block: number of rounds that a peer runs before the next one has its turn.
        memory: whether to run one more round for each peer, which measures the peak memory of taker and server.

    Returns:
        For each row, the figures of each peer and the ratios to the first.
    """
    results: dict[str, Any] = {}
    for row in rows:
        here = [peer for peer in peers if peer.takes_part(row)]
        if not here:
            continue
        times: dict[str, list[Timing]] = {peer.key: [] for peer in here}
        spent = {peer.key: 0.0 for peer in here}
        server_cpu = {peer.key: 0.0 for peer in here}
        totals: dict[str, Counter[str]] = {peer.key: Counter() for peer in here}
        for counted, peer in _turns(here, rounds, warm_up, block):
            if spent[peer.key] > budget and len(times[peer.key]) >= 3:
                continue
            before, total = cpu_seconds(peer.server_pids), peer.totals()
            started = time.monotonic()
            timing = peer.crew.round(row.name)
            spent[peer.key] += time.monotonic() - started
            if counted or spent[peer.key] > budget:
                times[peer.key].append(timing)
                server_cpu[peer.key] += cpu_seconds(peer.server_pids) - before
                totals[peer.key].update({name: value - total[name] for name, value in peer.totals().items()})
        found = {peer.key: _row(peer, times[peer.key], server_cpu[peer.key], totals[peer.key]) for peer in here}
        first = found[here[0].key]["rounds"]
        results[row.name] = {
            "bytes_of_a_gradient": row.bytes,
            "peers": found,
            "ratios": {peer.key: ratio(first, found[peer.key]["rounds"]) for peer in here[1:]},
        }
        if memory:
            for peer in here:
                found[peer.key]["peak_memory"] = _peak_memory(peer, row)
        _say(row, here, results[row.name])
    return results


def _turns(peers: list[Peer], rounds: int, warm_up: int, block: int) -> Iterator[tuple[bool, Peer]]:
    """Yields whether a round counts, and whose it is."""
    yield from ((False, peer) for _ in range(warm_up) for peer in peers)
    for start in range(0, rounds, block):
        for peer in peers:
            yield from repeat((True, peer), min(block, rounds - start))


def _peak_memory(peer: Peer, row: Workload) -> dict[str, int | None]:
    """Returns the bytes that the taker uses in a round beyond what it used before, and the most that the server uses.

    A server keeps memory for the next round, so what it used before would say nothing.
    """
    reset_peak_memory(peer.server_pids)
    timing = peer.crew.round(row.name, memory=True)
    return {"taker": timing.peak_memory, "server": peak_memory(peer.server_pids)}


def _row(peer: Peer, timings: list[Timing], server_cpu: float, totals: Counter[str]) -> dict[str, Any]:
    rounds = [peer.time(t) for t in timings]
    return {
        "seconds": summary(rounds),
        "apply_seconds": summary([apply for t in timings for apply in t.applies]),
        "tail_seconds": summary([t.tail for t in timings]),
        "cpu_seconds_a_round": {
            "workers": sum(t.worker_cpu for t in timings) / len(timings),
            "taker": sum(t.taker_cpu for t in timings) / len(timings),
            "server": server_cpu / len(timings),
        },
        **({"totals_a_round": {name: value / len(timings) for name, value in totals.items()}} if totals else {}),
        "rounds": rounds,
    }


def _say(row: Workload, peers: list[Peer], result: dict[str, Any]) -> None:
    print(f"  {row.name}")
    for peer in peers:
        seconds = result["peers"][peer.key]["seconds"]
        times = result["ratios"].get(peer.key)
        beside = f"   {peers[0].crew.name} takes {times['of_medians']:.2f} times as long" if times else ""
        peaks = result["peers"][peer.key].get("peak_memory", {})
        beside += "".join(f"   {who} {peak / 1e6:.1f} MB" for who, peak in peaks.items() if peak is not None)
        print(
            f"    {peer.crew.name:<28}{seconds['median'] * 1e3:9.2f} ms"
            f"   ({seconds['q1'] * 1e3:.2f} to {seconds['q3'] * 1e3:.2f}, {seconds['n']} rounds){beside}",
            flush=True,
        )


def six_rows(run: Run) -> dict[str, Any]:
    """Compares TensorFlow over gRPC with redisacc on three servers.

    The first server writes nothing to disk, and bare sockets take part as well. The second is the embedded server with
    its default settings, the third the same with an append-only file. Beside the first two, redisacc with bfloat16 on
    the wire takes part in the dense rows, on a server of its own of the same kind. The comparisons run one after the
    other: a server that writes to disk keeps writing after its round, at the cost of the peer whose round comes next.
    The report has TensorFlow's figures from the first comparison, and the ratios from all.
    """
    # A quick run leaves out the largest row.
    rows = workloads.TINY if run.tiny else list(workloads.SIX_ROWS)[: -1 if run.quick else None]
    effort = (4, 0.7, 1) if run.quick else (40, 8.0, 3)
    results: dict[str, Any] = {}
    crews: list[Crew] = []
    with contextlib.ExitStack() as stack:
        settings = run.arrays(rows, [run.workers])
        tensorflow = [tensorflow_crew(run, stack, settings)] if run.tensorflow else []
        crews += [peer.crew for peer in tensorflow]
        for persistent, durable in ((True, False),) if run.tiny else ((False, False), (True, False), (True, True)):
            with contextlib.ExitStack() as own:
                ours = [redisacc_crew(run, own, settings, "six rows", persistent=persistent, durable=durable)]
                if not durable:
                    ours.append(redisacc_crew(run, own, settings, "six rows", persistent=persistent, bfloat16=True))
                if not persistent or run.tiny:
                    ours.append(bare_crew(run, own, settings, "six rows"))
                crews += [peer.crew for peer in ours]
                found = compete([*tensorflow, *ours], rows, *effort)
            for name, row in found.items():
                known = results.setdefault(name, row)
                for key, peer in row["peers"].items():
                    known["peers"].setdefault(key, peer)
                known["ratios"] |= row["ratios"]
    for row, (goal, bar) in workloads.SIX_ROWS.items():
        if row.name in results:
            results[row.name] |= {"bar": bar, **({} if goal is None else {"goal": goal})}
    for name, bars in workloads.BFLOAT16_BARS.items():
        if name in results:
            results[name]["bfloat16_bars"] = bars
    return {"rows": results, "versions": {crew.name: crew.versions for crew in crews}}


def others(run: Run) -> dict[str, Any]:
    """Compares redisacc with the alternatives, with nothing written to disk."""
    rows = workloads.TINY if run.tiny else list(workloads.SIX_ROWS)[:: 2 if run.quick else 1]
    with contextlib.ExitStack() as stack:
        settings = run.arrays(rows, [run.workers])
        peers = [redisacc_crew(run, stack, settings, "other means", persistent=False)]
        if run.tensorflow:
            local = Crew(
                "TensorFlow, one process",
                run.tensorflow,
                "tensorflow_local",
                workers=run.workers,
                settings=settings,
                directory=run.directory,
                taker=False,
                shared=True,
            )
            stack.callback(local.end)
            peers.append(Peer("tensorflow-local", local, []))
        if run.torch:
            gloo = Crew(
                "torch all_reduce, gloo",
                run.torch,
                "torch_gloo",
                workers=run.workers,
                settings={**settings, "port": free_ports(1)[0]},
                directory=run.directory,
                taker=False,
            )
            stack.callback(gloo.end)
            peers.append(Peer("gloo", gloo, []))
        server, _ = stack.enter_context(run.start_server("other means, by hand", persistent=False))
        for method, name, fits in (
            # This method moves the whole table for every gradient.
            ("watch", "WATCH, get, add, set", lambda row: math.prod(row.shape) <= 2e6 or not run.quick),
            # Five million commands would show no more than 64,000 do.
            ("hincrbyfloat", "HINCRBYFLOAT, pipeline", lambda row: row.elements <= (1000 if run.quick else 64_000)),
        ):
            own = {**settings, "method": method}
            crew = crew_at(run, stack, own, server, name=name, program="by_hand")
            peers.append(Peer(method, crew, [server.pid], fits))
        effort = (3, 0.5, 1) if run.quick else (20, 3.0, 3)
        results = compete(peers, rows, *effort)
        return {"rows": results, "versions": {peer.crew.name: peer.crew.versions for peer in peers}}
