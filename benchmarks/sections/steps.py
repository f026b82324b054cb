"""Measures a training step of a model of many arrays: gradients, their mean, the update, and the new weights.

A step has begun when every worker has the weights of the step before, and is over when every worker has the next ones.
In between lie: each worker applies its gradient; the chief gets the mean, subtracts it from the weights, and publishes
them. Steps follow one another without a pause, a few in each timed block, as in a training whose gradients take no
time to compute. The chief and the workers are processes of their own.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import redis

import redisacc
from benchmarks import models
from benchmarks.crew import BenchmarkError, Crew, free_ports
from benchmarks.environment import Run, cpu_seconds
from benchmarks.models import Model
from benchmarks.sections.rounds import Peer
from benchmarks.stats import ratio, summary

# TensorFlow's time divided by ours: the goal, which the project aims for, and the bar, the least that it sets itself.
IN_MEMORY = {"goal": 4.5, "bar": 3.0}
PERSISTENT = {"bar": 2.0}
# The most that an apply of a tree of small arrays may take, as a multiple of the same bytes in one array.
SMALL_BAR = 2.0

METHODS = {
    "direct": "TreeAccumulator and Parameters",
    "loop": "Chief and Worker",
    "updates": "Chief with an optimizer, and Worker",
}

# How many steps a timed block has.
BLOCK = 5
# The bytes of the model whose number of arrays grows.
GROWING_BYTES = 4_000_000


def steps(run: Run) -> dict[str, Any]:
    """Measures steps of a model of 100 arrays, steps of models of ever more arrays, and applies of small trees."""
    results: dict[str, Any] = {"block": BLOCK}
    model = models.tiny() if run.tiny else models.mixed()
    blocks = 2 if run.tiny else 4 if run.quick else 30
    results["model"] = {"name": model.name, "arrays": len(model.leaves), "bytes_of_a_gradient": model.bytes}
    folder = _write(run, [model])
    for label, persistent in (("in memory", False), ("as embedded", True), ("durable", True)):
        durable = label == "durable"
        print(f"  {model.name}, {label}")
        with contextlib.ExitStack() as stack:
            peers = [_tensorflow(run, stack, folder, model)] if run.tensorflow else []
            peers += [
                _redisacc(run, stack, folder, model, method, persistent=persistent, durable=durable)
                for method in ("direct", "loop", "updates")
            ]
            if not persistent:
                peers.append(_bare(run, stack, folder, model))
            bars = {} if durable else PERSISTENT if persistent else IN_MEMORY
            results[label] = {**bars, **compete(peers, blocks)}
    results["growth"] = _growth(run, 2 if run.tiny else 4 if run.quick else 12)
    results["small"] = {"bar": SMALL_BAR, **_small(run)}
    return results


def _write(run: Run, every: list[Model]) -> Path:
    folder = run.directory / f"models-{every[0].name}"
    models.write(folder, every, run.workers)
    return folder


def _crew(run: Run, stack: contextlib.ExitStack, name: str, python: str, program: str, **settings: Any) -> Crew:
    helpers = settings.pop("helpers", ())
    everywhere = {"workloads": [], **settings}
    crew = Crew(
        name, python, program, workers=run.workers, settings=everywhere, directory=run.directory, helpers=helpers
    )
    stack.callback(crew.end)
    return crew


def _redisacc(
    run: Run,
    stack: contextlib.ExitStack,
    folder: Path,
    model: Model,
    method: str,
    *,
    persistent: bool,
    durable: bool = False,
) -> Peer:
    """Starts redisacc on a server of its own.

    Args:
        run, stack, folder, model: as for the other peers.
        method: by Chief and Worker, "loop"; by the same with an optimizer, "updates"; or by their parts, "direct".
        persistent: whether the server writes to its disk.
        durable: whether it writes every change.
    """
    disk = "durable" if durable else "as embedded" if persistent else "nothing on disk"
    server, client = stack.enter_context(
        run.start_server(f"steps, {method}, {disk}", persistent=persistent, durable=durable)
    )
    crew = _crew(
        run,
        stack,
        METHODS[method],
        sys.executable,
        "redisacc_steps",
        arrays=str(folder),
        model=model.name,
        url=server.url,
        method=method,
    )
    return Peer(method, crew, [server.pid], totals=partial(_counters, client))


def _bare(run: Run, stack: contextlib.ExitStack, folder: Path, model: Model) -> Peer:
    """Starts bare sockets that move the same bytes."""
    server, client = stack.enter_context(run.start_server("steps, bare sockets", persistent=False))
    crew = _crew(
        run,
        stack,
        "bare sockets",
        sys.executable,
        "bare_steps",
        arrays=str(folder),
        model=model.name,
        url=server.url,
    )
    return Peer("bare", crew, [server.pid], totals=partial(_counters, client))


def _tensorflow(run: Run, stack: contextlib.ExitStack, folder: Path, model: Model) -> Peer:
    """Starts TensorFlow over gRPC, with one process for the parameter server, each worker, and the chief."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(run.workers + 2)]
    assert run.tensorflow is not None
    crew = _crew(
        run,
        stack,
        "TensorFlow, gRPC",
        run.tensorflow,
        "tensorflow_steps",
        arrays=str(folder),
        model=model.name,
        cluster={"ps": ports[:1], "taker": ports[1:2], "worker": ports[2:]},
        helpers=("ps",),
    )
    return Peer("tensorflow", crew, crew.helper_pids)


def compete(peers: list[Peer], blocks: int, warm_up: int = 2) -> dict[str, Any]:
    """Runs blocks of steps of several peers in alternation, and compares the others with the first.

    Args:
        peers: the peers.
        blocks: number of blocks of `BLOCK` steps for each peer.
        warm_up: number of blocks before those that count.

    Returns:
        The figures of each peer and the ratios to the first.
    """
    times: dict[str, list[float]] = {peer.key: [] for peer in peers}
    cpu = {peer.key: np.zeros(3) for peer in peers}
    used: dict[str, Counter[str]] = {peer.key: Counter() for peer in peers}
    for number in range(-warm_up, blocks):
        for peer in peers:
            before, counted = cpu_seconds(peer.server_pids), peer.totals()
            timing = peer.crew.round("", repeat=BLOCK)
            if number < 0:
                continue
            times[peer.key].append(timing.finished / BLOCK)
            cpu[peer.key] += [timing.worker_cpu, timing.taker_cpu, cpu_seconds(peer.server_pids) - before]
            used[peer.key].update({name: value - counted[name] for name, value in peer.totals().items()})
    for peer in peers:
        # Weights are checked when the next block is prepared, so this checks the last block's.
        peer.crew.round("", repeat=1)
    first = peers[0].key
    found: dict[str, Any] = {"peers": {}, "ratios": {}}
    for peer in peers:
        total = blocks * BLOCK
        found["peers"][peer.key] = {
            "name": peer.crew.name,
            "seconds": summary(times[peer.key]),
            "cpu_seconds_a_step": dict(zip(("workers", "chief", "server"), cpu[peer.key] / total, strict=True)),
            "server_a_step": {name: value / total for name, value in used[peer.key].items()},
            "blocks": times[peer.key],
        }
        if peer.key != first:
            found["ratios"][peer.key] = ratio(times[first], times[peer.key])
        seconds = found["peers"][peer.key]["seconds"]
        beside = ""
        if peer.key != first:
            beside = f"   {peers[0].crew.name} takes {found['ratios'][peer.key]['of_medians']:.2f} times as long"
        costs = ", ".join(f"{name} {value / total * 1e3:.1f}" for name, value in zip("wcs", cpu[peer.key], strict=True))
        print(
            f"    {peer.crew.name:<32}{seconds['median'] * 1e3:9.2f} ms"
            f"   ({seconds['q1'] * 1e3:.2f} to {seconds['q3'] * 1e3:.2f})   CPU ms {costs}"
            f"{beside}",
            flush=True,
        )
    return found


def _counters(client: redis.Redis) -> dict[str, float]:
    """Returns the bytes that a server has received and sent, and the commands that clients have sent to it."""
    info = client.info("stats")
    return {
        "bytes_in": info["total_net_input_bytes"],
        "bytes_out": info["total_net_output_bytes"],
        "commands": info["total_commands_processed"],
    }


def _growth(run: Run, blocks: int) -> list[dict[str, Any]]:
    """Measures how a step grows with the number of arrays that share the same bytes."""
    counts = (1, 4) if run.tiny else (1, 10, 100, 1000)
    every = [models.even(number, 64 if run.tiny else GROWING_BYTES // 4) for number in counts]
    folder, found = _write(run, every), []
    print("  number of arrays")
    with contextlib.ExitStack() as stack:
        peers = [_redisacc(run, stack, folder, model, "direct", persistent=False) for model in every]
        for peer, model in zip(peers, every, strict=True):
            peer.key = peer.crew.name = f"{len(model.leaves)}"
        results = compete(peers, blocks)
        for model in every:
            key = f"{len(model.leaves)}"
            point = {"arrays": len(model.leaves), "bytes_of_a_gradient": model.bytes, **results["peers"][key]}
            point["ratio"] = 1 / results["ratios"][key]["of_medians"] if key in results["ratios"] else 1.0
            found.append(point)
    return found


def _small(run: Run) -> dict[str, Any]:
    """Measures what applying a tree of small arrays costs, compared with one array of as many bytes."""
    number, elements, rounds = (4, 8, 5) if run.tiny else (100, 25, 40 if run.quick else 400)
    values = np.arange(number * elements, dtype=np.float32)
    tree = {f"a{leaf:03}": values[leaf * elements : (leaf + 1) * elements].copy() for leaf in range(number)}
    times: dict[str, list[float]] = {"tree": [], "array": []}
    with run.start_server("steps, small arrays", persistent=False) as (server, _):
        handles: dict[str, Any] = {
            "tree": redisacc.TreeAccumulator.like(tree, "small tree", redis=server.url),
            "array": redisacc.ConditionalAccumulator("float32", values.shape, "small array", redis=server.url),
        }
        given = {"tree": tree, "array": values}
        for turn in range(-10, rounds):
            for name, acc in handles.items():
                started = time.perf_counter()
                applied = acc.apply_grad(given[name], local_step=turn + 10)
                elapsed = time.perf_counter() - started
                taken = acc.take_grad(1)
                parts = [taken] if name == "array" else list(taken.values())
                if not applied or not np.array_equal(np.concatenate(parts), values):
                    raise BenchmarkError(f"steps: a wrong result of the small {name}")
                if turn >= 0:
                    times[name].append(elapsed)
    found = {
        "arrays": number,
        "bytes": values.nbytes,
        "seconds": {name: summary(elapsed) for name, elapsed in times.items()},
        "ratio": ratio(times["tree"], times["array"]),
    }
    print(
        f"  {number} small arrays: apply {found['seconds']['tree']['median'] * 1e6:.0f} µs, one array "
        f"{found['seconds']['array']['median'] * 1e6:.0f} µs, ratio {found['ratio']['of_medians']:.2f}",
        flush=True,
    )
    return found
