"""Measures what the machine allows, and how close redisacc comes.

The limits are SET, GET and EVALSHA by a bare socket, and numpy's addition. One process and one server run redisacc and
the bare socket in alternation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import redis

import redisacc
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run
from benchmarks.peers.bare import Bare
from benchmarks.slow_log import NOTHING
from benchmarks.stats import ratio, summary
from benchmarks.workloads import Array, Workload

# About the length of the parts of a buffered gradient.
PIECE = 2 * 2**20

# Adds 10 rows of 16 floats without any checks: no step, no shape, no count, no guarantee.
UNGUARDED = """
local stored = redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
local rows, write, format = ARGV[1], {}, '<' .. string.rep('f', 16)
for i = 1, #stored do
  local new = string.sub(rows, 64 * i - 63, 64 * i)
  if stored[i] then
    local a, b = {struct.unpack(format, stored[i])}, {struct.unpack(format, new)}
    for k = 1, 16 do a[k] = a[k] + b[k] end
    new = struct.pack(format, unpack(a, 1, 16))
  end
  write[2 * i - 1], write[2 * i] = ARGV[i + 1], new
end
redis.call('HSET', KEYS[1], unpack(write))
return 1
"""

Times = dict[str, list[float]]


def measure(times: Times, name: str, function: Callable[[], Any]) -> Any:
    """Calls a function, records its time under ``name``, and returns its result."""
    started = time.perf_counter()
    result = function()
    times.setdefault(name, []).append(time.perf_counter() - started)
    return result


def wait_until_freed(client: redis.Redis) -> None:
    """Waits until the server has freed, in the background, what was removed."""
    deadline = time.monotonic() + 5
    while client.info("memory").get("lazyfree_pending_objects", 0) and time.monotonic() < deadline:
        time.sleep(0.001)


def large(client: redis.Redis, url: str, bare: Bare, shape: tuple[int, ...], rounds: int) -> Times:
    """Compares SET and GET of one array with applying and taking it.

    The keys of each round are new, and removed afterwards. The order changes from round to round, because the first
    command finds other contents in the caches than the second.
    """
    gradients = [Workload("limits", "dense", shape).gradient(0, variant)[1] for variant in range(2)]
    shuffle = np.random.default_rng(0).permutation
    same = np.empty(shape, np.float32)
    times: Times = {}
    with redisacc.ConditionalAccumulator(
        "float32", shape, f"limits-{shape[0]}x{shape[1]}", redis=url, limits=redisacc.Limits(0)
    ) as acc:
        for number in range(-3, rounds):
            gradient = gradients[number % 2]
            data = gradient.reshape(-1).view(np.uint8).data
            names = [b"bare:%d:%d" % (number, k) for k in range(math.ceil(len(data) / PIECE) + 1)]

            def set_one(name: bytes = names[-1], data: memoryview = data) -> None:
                bare.send(b"SET", name, data)
                bare.lines()

            def set_pieces(names: list[bytes] = names, data: memoryview = data) -> None:
                for k, name in enumerate(names[:-1]):
                    bare.send(b"SET", name, data[k * PIECE : (k + 1) * PIECE])
                bare.lines(len(names) - 1)

            def get_into(array: Array, name: bytes = names[-1]) -> Array:
                bare.send(b"GET", name)
                bare.bulk_into(array)
                return array

            def apply(gradient: Array = gradient) -> None:
                if not acc.apply_grad(gradient, local_step=2**40):
                    raise BenchmarkError("limits: a gradient was stale")

            writes = {"bare SET": set_one, "bare SET in pieces": set_pieces, "apply": apply}
            reads = {
                "bare GET, same array": lambda get=get_into: get(same),
                "bare GET, new array": lambda get=get_into: get(np.empty(shape, np.float32)),
                "take": lambda: acc.take_grad(1),
            }
            wait_until_freed(client)
            for several in (writes, reads):
                for name in shuffle(list(several)):
                    array = measure(times if number >= 0 else {}, name, several[name])
                    if several is reads and not np.array_equal(array, gradient):
                        raise BenchmarkError(f"limits: a wrong array of shape {shape} from {name}")
            client.unlink(*names)
    return times


def small(client: redis.Redis, url: str, bare: Bare, rounds: int) -> Times:
    """Compares applying 10x16 with bare EVALSHA of nothing, with the same bytes, and of an unguarded addition."""
    workload = Workload("limits-small", "sparse", (1000, 16), 10)
    indices, values = workload.gradient(0, 0)
    assert indices is not None
    nothing = client.script_load(NOTHING).encode()
    unguarded = client.script_load(UNGUARDED).encode()
    rows = values.tobytes()
    texts = [str(index).encode() for index in indices.tolist()]
    times: Times = {}

    def evalsha(*arguments: bytes) -> None:
        bare.send(b"EVALSHA", *arguments)
        bare.lines()

    with redisacc.SparseConditionalAccumulator("float32", workload.shape, workload.name, redis=url) as acc:
        for number in range(-20, rounds):
            noted: Times = times if number >= 0 else {}
            measure(noted, "bare EVALSHA", lambda: evalsha(nothing, b"0"))
            measure(noted, "apply 10x16", lambda: acc.apply_grad(indices, values, local_step=2**40))
            measure(noted, "bare EVALSHA, same bytes", lambda: evalsha(nothing, b"0", rows, *texts))
            measure(
                noted, "bare EVALSHA, unguarded addition", lambda: evalsha(unguarded, b"1", b"bare:rows", rows, *texts)
            )
            measure(noted, "redis-py PING", client.ping)
        found, mean = acc.take_grad(1)[:2]
        if not (np.array_equal(found, indices) and np.allclose(mean, values, rtol=1e-5)):
            raise BenchmarkError("limits: a wrong mean of small gradients")
    client.unlink("bare:rows")
    return times


def add(shape: tuple[int, ...], rounds: int) -> Times:
    """Measures numpy's addition of the same array."""
    total, gradient = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    times: Times = {}
    for _ in range(rounds):
        measure(times, "numpy add in place", lambda: np.add(total, gradient, out=total))
    return times


def limits(run: Run) -> dict[str, Any]:
    """Measures both sizes, on the embedded server with its default settings and with nothing on disk."""
    rounds = 5 if run.tiny else 15 if run.quick else 80
    sizes = {"small": (10, 10)} if run.tiny else {"4 MB": (1000, 1000), "32 MB": (4000, 2000)}
    results: dict[str, Any] = {}
    for persistent in (True, False):
        label = "as embedded" if persistent else "nothing on disk"
        with run.start_server(f"limits, {label}", persistent=persistent) as (server, client):
            assert server.port is not None
            bare = Bare("127.0.0.1", server.port)
            here: dict[str, Any] = {}
            for size, shape in sizes.items():
                here[size] = _summaries(
                    large(client, server.url, bare, shape, rounds if size == "4 MB" else max(rounds // 4, 5))
                    | add(shape, rounds),
                    {"SET": ("bare SET", "apply"), "GET": ("bare GET, same array", "take")},
                ) | {"bytes": math.prod(shape) * 4}
            here["10x16"] = _summaries(
                small(client, server.url, bare, rounds * 20), {"EVALSHA": ("apply 10x16", "bare EVALSHA")}
            )
            bare.close()
        results[label] = here
        _say(label, here)
    return {"servers": results, "wanted": {"SET": 0.8, "GET": 0.7, "EVALSHA": 1.5}}


def _summaries(times: Times, ratios: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        "seconds": {name: summary(one) for name, one in times.items()},
        "ratios": {name: ratio(times[above], times[below]) for name, (above, below) in ratios.items()},
    }


def _say(label: str, results: dict[str, Any]) -> None:
    print(f"  {label}")
    for size, result in results.items():
        for name, seconds in result["seconds"].items():
            rate = f"{result['bytes'] / seconds['median'] / 1e9:8.2f} GB/s" if "bytes" in result else ""
            print(f"    {size:<7}{name:<34}{seconds['median'] * 1e6:10.0f} µs{rate}")
        for name, times in result["ratios"].items():
            print(f"    {size:<7}ratio to {name:<25}{times['of_medians']:10.2f}", flush=True)
