"""Runs cases on TensorFlow's own accumulators: a child process that reads and writes JSON lines.

Needs tensorflow-cpu and numpy, neither redisacc nor a Redis server. One line in is one case; for each of its
operations one line comes out, flushed, so that the parent knows the operation under which TensorFlow took the
process down. After the last operation comes {"done": true}. On start it prints {"version": "2.x.y"}.

A case:

    {"id": str, "api": "class" | "raw", "server": bool, "handles": [HANDLE...], "ops": [OPERATION...]}
    HANDLE:    {"kind": "dense" | "sparse", "dtype": str, "shape": null | [int | null...],
                "reduction": str | null, "shared_name": str | null}
    OPERATION: {"op": NAME, "handle": 0, ...arguments}

    apply            dense: grad, step; sparse: indices, values, grad_shape (null: unknown), step
    take             num_required
    num_accumulated
    set_global_step  step
    start_take       taker (a label), num_required, timeout (seconds, null: none): in a thread; comes back
                     when the taker is in the queue
    still_waiting    taker
    wait             taker: the outcome of its take
    reopen           closes the session and opens another one on the same server (needs "server")

An argument that is a coded array (see arraycode) or an int is fed through a placeholder of unknown shape, so
the kernel sees it, not the Python layer; with "static": true in the operation, and for every other Python
value, it is passed to the method as it is.

An outcome has "count", num_accumulated after the operation (absent while a taker waits), and one of

    {"ok": null | int | ARRAY | [INDICES, VALUES, SHAPE]}
    {"error": TYPE, "message": first line}
    {"blocked": true}                    a take that did not end in time; it was cancelled
    {"waiting": bool}                    of still_waiting
"""

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # 1 keeps warnings: set_global_step says one
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from arraycode import decode, encode, is_array

v1 = tf.compat.v1

# A take that has what it needs ends in well under a millisecond; what isn't back by then blocks.
BLOCKED_AFTER_MS = 300
SETTLE = 0.15
WAIT_AT_MOST = 20.0

Outcome = dict[str, Any]


class Stderr:
    """The process's file descriptor 2, turned into a file: TensorFlow's C++ log goes there."""

    def __init__(self):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        os.dup2(self._file.fileno(), 2)

    def size(self):
        return os.fstat(self._file.fileno()).st_size

    def since(self, offset):
        length = self.size() - offset
        return os.pread(self._file.fileno(), length, offset).decode(errors="replace")


def short(error):
    """The line of an error's message that says what was wrong, without what differs from run to run."""
    text = str(getattr(error, "message", None) or error)
    lines = [line.strip() for line in text.rsplit("\nNode: ", maxsplit=1)[-1].split("\n")]
    lines = [line for line in lines if line and not (line.startswith("'") and line.endswith("'"))]
    line = lines[0] if lines else ""
    line = re.sub(r" with these attrs: .*", "", line)
    line = re.sub(r"0x[0-9a-f]+", "0x", line)
    return line[:160]


def as_dtype(name):
    return tf.dtypes.as_dtype(name)


class Accumulator:
    """One handle of a case: its operations are built once for each form of arguments and then only run."""

    def __init__(self, api, spec, label):
        self.kind = spec["kind"]
        self.dtype = as_dtype(spec["dtype"])
        self.raw = api == "raw"
        self.built = {}
        given = {"dtype": self.dtype, "shape": spec["shape"], "name": label}
        if "reduction" in spec:
            given["reduction_type"] = spec["reduction"]
        if spec.get("shared_name") is not None:
            given["shared_name"] = spec["shared_name"]
        if self.raw:
            made = {
                "dense": tf.raw_ops.ConditionalAccumulator,
                "sparse": tf.raw_ops.SparseConditionalAccumulator,
            }
        else:
            made = {"dense": v1.ConditionalAccumulator, "sparse": v1.SparseConditionalAccumulator}
        self.acc = made[self.kind](**given)
        self.count = self._count()

    def _count(self):
        if self.raw:
            return tf.raw_ops.AccumulatorNumAccumulated(handle=self.acc)
        return self.acc.num_accumulated()

    def _apply(self, grad_or_indices, values, shape, known, step):
        if self.kind == "dense":
            if self.raw:
                return tf.raw_ops.AccumulatorApplyGradient(handle=self.acc, local_step=step, gradient=grad_or_indices)
            return self.acc.apply_grad(grad_or_indices, local_step=step)
        if self.raw:
            return tf.raw_ops.SparseAccumulatorApplyGradient(
                handle=self.acc,
                local_step=step,
                gradient_indices=grad_or_indices,
                gradient_values=values,
                gradient_shape=shape if known else [],
                has_known_shape=known,
            )
        return self.acc.apply_grad(grad_or_indices, values, shape if known else None, local_step=step)

    def _take(self, num_required):
        if not self.raw:
            return self.acc.take_grad(num_required)
        if self.kind == "dense":
            return tf.raw_ops.AccumulatorTakeGradient(handle=self.acc, num_required=num_required, dtype=self.dtype)
        return tf.raw_ops.SparseAccumulatorTakeGradient(handle=self.acc, num_required=num_required, dtype=self.dtype)

    def _set_step(self, step):
        if self.raw:
            return tf.raw_ops.AccumulatorSetGlobalStep(handle=self.acc, new_global_step=step)
        return self.acc.set_global_step(step)

    def prepare(self, op):
        """Returns what to fetch and what to feed for an operation."""
        name = "take" if op["op"] == "start_take" else op["op"]
        build: Callable[..., Any]
        if name == "num_accumulated":
            return self.count, {}
        if name == "take":
            build, args = self._take, [(op["num_required"], "int32")]
        elif name == "set_global_step":
            build, args = self._set_step, [(op["step"], "int64")]
        elif self.kind == "dense":
            args = [(op["grad"], self.dtype.name), (op["step"], "int64")]

            def build(grad, step):
                return self._apply(grad, None, None, False, step)

        else:
            known = op["grad_shape"] is not None
            args = [(op["indices"], "int64"), (op["values"], self.dtype.name), (op["step"], "int64")]
            if known:
                args.append((op["grad_shape"], "int64"))

            def build(indices, values, step, shape=None):
                return self._apply(indices, values, shape, known, step)

        slots = []  # a dtype to feed, or None where the value itself was built in
        given = []
        for value, dtype in args:
            coded = is_array(value)
            if op.get("static") or not (coded or type(value) is int):
                slots.append(None)
                given.append(self._typed(value) if coded else value)
            else:
                slots.append(value["dtype"] if coded else dtype)
                given.append(self._typed(value) if coded else value)
        if None in slots:
            inputs = [v1.placeholder(as_dtype(s)) if s else g for s, g in zip(slots, given, strict=True)]
            fetch = build(*inputs)
        else:
            key = (name, tuple(slots))
            if key not in self.built:
                inputs = [v1.placeholder(as_dtype(s)) for s in slots]
                self.built[key] = (build(*inputs), inputs)
            fetch, inputs = self.built[key]
        feed = {i: g for i, g, s in zip(inputs, given, slots, strict=True) if s}
        return fetch, feed

    @staticmethod
    def _typed(coded):
        array = decode(coded)
        dtype = as_dtype(coded["dtype"]).as_numpy_dtype
        return array.view(dtype) if np.dtype(dtype).names else array


class Taker(threading.Thread):
    """A take in a thread of its own."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self._call = run
        self.outcome = {}

    def run(self):
        self.outcome = self._call()


class CaseRun:
    """One case under way: a graph, a session, the handles."""

    def __init__(self, case, stderr):
        self.case = case
        self.stderr = stderr
        self.target = server_target() if case.get("server") else ""
        self.graph = tf.Graph()
        self.handles = []
        self.takers = {}
        self.session = None

    def build(self):
        with self.graph.as_default():
            for number, spec in enumerate(self.case["handles"]):
                self.handles.append(Accumulator(self.case.get("api", "class"), spec, f"handle{number}"))
        self.session = v1.Session(self.target, graph=self.graph)

    def run(self, fetch, feed, timeout_ms):
        options = v1.RunOptions(timeout_in_ms=timeout_ms) if timeout_ms else None
        try:
            value = self.session.run(fetch, feed_dict=feed, options=options)
        except (tf.errors.DeadlineExceededError, tf.errors.CancelledError):
            return {"blocked": True}
        except (tf.errors.OpError, ValueError, TypeError) as error:
            return {"error": type(error).__name__, "message": short(error)}
        if value is None:
            return {"ok": None}
        if isinstance(value, np.ndarray | np.generic):
            plain = np.ndim(value) == 0 and getattr(value, "dtype", None) == np.int32
            return {"ok": int(value) if plain and fetch.op.type.endswith("Accumulated") else encode(value)}
        if isinstance(value, tuple):
            return {"ok": [encode(part) for part in value]}
        return {"ok": int(value)}

    def step(self, op):
        name = op["op"]
        if name == "reopen":
            self.session.close()
            self.session = v1.Session(self.target, graph=self.graph)
            return {"ok": None}
        if name == "still_waiting":
            time.sleep(SETTLE)
            return {"waiting": self.takers[op["taker"]].is_alive()}
        if name == "wait":
            taker = self.takers.pop(op["taker"])
            taker.join(WAIT_AT_MOST)
            return {"waiting": True} if taker.is_alive() else taker.outcome
        handle = self.handles[op.get("handle", 0)]
        try:
            with self.graph.as_default():
                fetch, feed = handle.prepare(op)
        except (tf.errors.OpError, ValueError, TypeError, OverflowError) as error:
            return {"error": type(error).__name__, "message": short(error)}
        if name == "start_take":
            timeout = op.get("timeout")
            milliseconds = int(timeout * 1000) if timeout else None
            taker = self.takers[op["taker"]] = Taker(lambda: self.run(fetch, feed, milliseconds))
            taker.start()
            time.sleep(SETTLE)
            return {"ok": None}
        before = self.stderr.size()
        outcome = self.run(fetch, feed, BLOCKED_AFTER_MS if name == "take" else None)
        if name == "set_global_step":
            outcome["warned"] = "smaller" in self.stderr.since(before)
        return outcome

    def outcome(self, op):
        result = self.step(op)
        if not self.takers:
            counted = self.run(self.handles[op.get("handle", 0)].count, {}, None)
            result["count"] = counted.get("ok")
        return result


_servers = []


def server_target():
    """A TensorFlow server in this process, started once: its sessions share everything with a shared_name."""
    if not _servers:
        _servers.append(v1.train.Server.create_local_server())
    return str(_servers[0].target)


def main():
    v1.disable_eager_execution()
    out = os.fdopen(os.dup(1), "w")
    stderr = Stderr()
    os.dup2(2, 1)  # whatever TensorFlow prints must not get between the lines

    def say(line):
        out.write(json.dumps(line) + "\n")
        out.flush()

    say({"version": tf.__version__})
    for line in sys.stdin:
        case = json.loads(line)
        run = CaseRun(case, stderr)
        try:
            run.build()
        except (tf.errors.OpError, ValueError, TypeError) as error:
            say({"construction": {"error": type(error).__name__, "message": short(error)}})
            say({"done": True})
            continue
        say({"construction": {"ok": None}})
        for op in case["ops"]:
            say(run.outcome(op))
        run.session.close()
        say({"done": True})


if __name__ == "__main__":
    main()
