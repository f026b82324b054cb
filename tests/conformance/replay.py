"""Runs the cases that TensorFlow was recorded with on redisacc, and compares.

How gradients are added that are stored in different ways, in one round, the state machine compares with the model.
"""

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from arraycode import decode, encode, is_array
from departures import DEPARTURES
from support.selection import IN_PARTS, STORAGES
from support.until import until

import redisacc
from redisacc import raw_ops

# A take that has what it needs doesn't wait at all, so these matter only to how long the tests last.
BLOCKED_AFTER = 0.02
STILL_WAITING_AFTER = 0.05
# TensorFlow's takers, with 0.15 s for each to get into the queue, have longer timeouts than ours need.
TAKER_TIMEOUT_SHARE = 0.5
WAIT_AT_MOST = 20.0


class _Warnings(logging.Handler):
    """Counts the warnings of the library's logger."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record):
        self.count += record.levelno == logging.WARNING


class _Taker(threading.Thread):
    def __init__(self, take):
        super().__init__(daemon=True)
        self._take = take
        self.outcome = {}

    def run(self):
        self.outcome = self._take()


class _Handle:
    """One handle of a case."""

    def __init__(self, spec, client, storage, name):
        self.kind = spec["kind"]
        opens = {
            "dense": redisacc.ConditionalAccumulator,
            "sparse": redisacc.SparseConditionalAccumulator,
        }[self.kind]
        options = {"reduction_type": spec["reduction"]} if "reduction" in spec else {}
        if storage == "partitions":
            options["partitions"] = 3
        limits = redisacc.Limits(in_place=STORAGES[storage], inline=0 if storage in IN_PARTS else None)
        self._accumulator = opens(spec["dtype"], spec["shape"], name, redis=client, limits=limits, **options)

    def num_accumulated(self):
        return int(self._accumulator.num_accumulated())

    def apply(self, op):
        step = _argument(op["step"])
        if self.kind == "dense":
            return self._accumulator.apply_grad(_argument(op["grad"]), step)
        indices, values = _argument(op["indices"]), _argument(op["values"])
        return self._accumulator.apply_grad(indices, values, _argument(op["grad_shape"]), step)

    def take(self, num_required, timeout):
        return self._accumulator.take_grad(num_required, timeout=timeout)

    def set_global_step(self, step):
        self._accumulator.set_global_step(step)

    def waiting(self):
        return len(self._accumulator.info().waiting)

    def close(self):
        self._accumulator.close()


class _RawHandle(_Handle):
    """As _Handle, through raw_ops, which hold gradients by the library's default."""

    def __init__(self, spec, client, name):
        self.kind = spec["kind"]
        self._client = client
        opens = {"dense": raw_ops.ConditionalAccumulator, "sparse": raw_ops.SparseConditionalAccumulator}
        self.ref = opens[self.kind](
            dtype=spec["dtype"],
            shape=spec["shape"],
            shared_name=name,
            reduction_type=spec.get("reduction", "MEAN"),
            redis=client,
        )
        self._dtype = spec["dtype"]

    def num_accumulated(self):
        return int(raw_ops.AccumulatorNumAccumulated(handle=self.ref, redis=self._client))

    def apply(self, op):
        step = _argument(op["step"])
        if self.kind == "dense":
            return raw_ops.AccumulatorApplyGradient(
                handle=self.ref, local_step=step, gradient=_argument(op["grad"]), redis=self._client
            )
        shape = _argument(op["grad_shape"])
        return raw_ops.SparseAccumulatorApplyGradient(
            handle=self.ref,
            local_step=step,
            gradient_indices=_argument(op["indices"]),
            gradient_values=_argument(op["values"]),
            gradient_shape=[] if shape is None else shape,
            has_known_shape=shape is not None,
            redis=self._client,
        )

    def take(self, num_required, timeout):
        takes = {"dense": raw_ops.AccumulatorTakeGradient, "sparse": raw_ops.SparseAccumulatorTakeGradient}
        return takes[self.kind](
            handle=self.ref,
            num_required=num_required,
            dtype=self._dtype,
            timeout=timeout,
            redis=self._client,
        )

    def set_global_step(self, step):
        raw_ops.AccumulatorSetGlobalStep(handle=self.ref, new_global_step=step, redis=self._client)

    def close(self):
        pass


def _argument(value):
    return decode(value) if is_array(value) else value


class CaseRun:
    """A case under way on a server.

    After each operation num_accumulated is asked for; with `sparing`, not where apply_grad's result has said it.
    """

    def __init__(self, case, client, storage, *, sparing=False):
        self._sparing = sparing
        self._case = case
        self._client = client
        self._storage = storage
        self._handles = []
        self._takers = {}
        self._warnings = _Warnings()

    def outcomes(self):
        """{"construction": OUTCOME, "outcomes": [OUTCOME...]}, as TensorFlow's driver gives them."""
        logger = logging.getLogger("redisacc")
        logger.addHandler(self._warnings)
        try:
            try:
                for number in range(len(self._case["handles"])):
                    self._handles.append(self._open(number))
            except Exception as error:
                return {"construction": _failure(error), "outcomes": []}
            return {"construction": {"ok": None}, "outcomes": [self._outcome(op) for op in self._case["ops"]]}
        finally:
            self._end()
            logger.removeHandler(self._warnings)

    def _open(self, number):
        spec = self._case["handles"][number]
        name = spec.get("shared_name")
        private = f"{self._case['id']} {number}"
        if self._case.get("api") == "raw":
            return _RawHandle(spec, self._client, name or private)
        return _Handle(spec, self._client, self._storage, name)

    def _end(self):
        for handle in self._handles:
            handle.close()
        for taker in self._takers.values():
            taker.join(WAIT_AT_MOST)
        # Shared accumulators outlive their handles, and the next case begins with an empty database.
        self._client.flushdb()

    def _outcome(self, op):
        outcome = self._step(op)
        if self._sparing and "said" in outcome:
            outcome["count"] = outcome["said"]
        elif not self._takers:
            outcome["count"] = self._handles[op.get("handle", 0)].num_accumulated()
        return outcome

    def _step(self, op):
        name = op["op"]
        number = op.get("handle", 0)
        if name == "reopen":
            self._handles[number].close()
            self._handles[number] = self._open(number)
            return {"ok": None}
        if name == "still_waiting":
            taker = self._takers[op["taker"]]
            taker.join(STILL_WAITING_AFTER)
            return {"waiting": taker.is_alive()}
        if name == "wait":
            taker = self._takers.pop(op["taker"])
            taker.join(WAIT_AT_MOST)
            return {"waiting": True} if taker.is_alive() else taker.outcome
        handle = self._handles[number]
        if name == "start_take":
            return self._start(handle, op)
        if name == "take":
            return _attempt(lambda: _coded(handle.take(_argument(op["num_required"]), BLOCKED_AFTER)))
        if name == "num_accumulated":
            return _attempt(handle.num_accumulated)
        if name == "set_global_step":
            before = self._warnings.count
            outcome = _attempt(lambda: handle.set_global_step(_argument(op["step"])))
            outcome["warned"] = self._warnings.count > before
            return outcome
        return self._apply(handle, op)

    @staticmethod
    def _apply(handle, op):
        results = []
        outcome = _attempt(lambda: results.append(handle.apply(op)))
        if results:
            outcome["applied"] = bool(results[0])
            outcome["said"] = results[0].num_accumulated
        return outcome

    def _start(self, handle, op):
        waiting = handle.waiting()
        timeout = op["timeout"] and op["timeout"] * TAKER_TIMEOUT_SHARE
        taker = _Taker(lambda: _attempt(lambda: _coded(handle.take(op["num_required"], timeout))))
        self._takers[op["taker"]] = taker
        taker.start()
        until(lambda: handle.waiting() != waiting or not taker.is_alive(), WAIT_AT_MOST)
        return {"ok": None}


def _coded(value):
    if isinstance(value, tuple):
        return [encode(part) for part in value]
    return encode(value)


def _failure(error):
    return {"error": type(error).__name__, "message": str(error)}


def _attempt(call):
    try:
        return {"ok": call()}
    except redisacc.TakeTimeoutError:
        return {"blocked": True}
    except Exception as error:
        return _failure(error)


# --- comparison -------------------------------------------------------------------------------------


@dataclass
class Summary:
    """A summary of the comparison."""

    cases: int = 0
    operations: int = 0
    departures: int = 0  # operations at which we do something else on purpose
    arrays: Counter[str] = field(default_factory=Counter)  # dtype of a result -> number compared
    identical: Counter[str] = field(default_factory=Counter)  # ... of them bit for bit
    differences: list[str] = field(default_factory=list)

    def __str__(self):
        of = ", ".join(f"{self.identical[d]} of {n} {d}" for d, n in sorted(self.arrays.items()))
        return (
            f"{self.cases} cases, {self.operations} operations, {self.departures} of them departures; "
            f"results bit-identical: {of}; "
            f"{len(self.differences)} differences"
        )


def identical(a, b):
    """Same dtype, shape and bits; a NaN is a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    same = np.ascontiguousarray(a).reshape(-1).view(np.uint8) == np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    if same.all():
        return True
    if a.dtype.kind not in "fc":
        return False
    each = same.reshape(a.size, a.dtype.itemsize).all(axis=1)
    return bool((each | (np.isnan(a) & np.isnan(b)).reshape(-1)).all())


def _arrays(outcome):
    value = outcome.get("ok")
    if is_array(value):
        return [value]
    return value if isinstance(value, list) else []


def disagreement(expected, ours, *, any_error):
    """Returns the difference between two outcomes of an operation; None if there is none.

    Args:
        expected: TensorFlow's outcome, or what a departure says.
        ours: what redisacc did.
        any_error: every error of `expected` matches our InvalidArgumentError; TensorFlow has many types.
    """
    for key in ("blocked", "waiting", "aborted"):
        if expected.get(key) != ours.get(key):
            return f"{key}: {expected.get(key)} against {ours.get(key)} ({_short(ours)})"
    wanted = expected.get("error")
    if wanted is not None and any_error:
        wanted = "InvalidArgumentError"
    if wanted != ours.get("error"):
        return f"{_short(expected)} against {_short(ours)}"
    theirs_arrays, our_arrays = _arrays(expected), _arrays(ours)
    if len(theirs_arrays) != len(our_arrays):
        return f"{_short(expected)} against {_short(ours)}"
    for theirs, mine in zip(theirs_arrays, our_arrays, strict=True):
        a, b = decode(theirs), decode(mine)
        if not identical(a, b):
            return f"{a.dtype} {a.tolist()} against {b.dtype} {b.tolist()}"
    if not theirs_arrays and expected.get("ok") != ours.get("ok"):
        return f"{expected.get('ok')} against {ours.get('ok')}"
    for key in ("count", "warned"):
        if expected.get(key) is not None and ours.get(key) is not None and expected[key] != ours[key]:
            return f"{key}: {expected[key]} against {ours[key]}"
    if "said" in ours and "count" in ours and ours["said"] != ours["count"]:
        return f"the result says num_accumulated {ours['said']}, afterwards it is {ours['count']}"
    return None


def _short(outcome):
    if "error" in outcome:
        return f"{outcome['error']}: {outcome.get('message', '')}"[:200]
    if _arrays(outcome):
        return str([decode(array).tolist() for array in _arrays(outcome)])[:200]
    return str({key: value for key, value in outcome.items() if key != "count"})[:200]


def compare(recorded, ours, summary):
    """Adds to the summary what was compared in a case, and every difference."""
    name = recorded["id"]
    departure = DEPARTURES.get(name)
    summary.cases += 1

    def differs(where, what):
        summary.differences.append(f"{name}, {where}: {what}")

    wanted = departure.construction if departure else None
    problem = _check(recorded["construction"], ours["construction"], wanted, summary)
    if problem:
        differs("opening", problem)
    if "error" in ours["construction"] or "error" in recorded["construction"]:
        return
    before = 0
    for number, (op, mine) in enumerate(zip(recorded["ops"], ours["outcomes"], strict=True)):
        theirs = recorded["outcomes"][number] if number < len(recorded["outcomes"]) else None
        wanted = departure.ours.get(number) if departure else None
        if theirs is None and wanted is None:
            differs(f"operation {number}", "TensorFlow has no outcome here, and no departure says ours")
            continue
        problem = _check(theirs or {"aborted": True}, mine, wanted, summary)
        if problem:
            differs(f"operation {number} ({op['op']})", problem)
        # In a case of one handle the count tells whether TensorFlow accepted a gradient.
        if len(recorded["handles"]) == 1 and wanted is None and theirs and theirs.get("count") is not None:
            if "applied" in mine and not departure and mine["applied"] != (theirs["count"] > before):
                differs(f"operation {number} (apply)", f"we said {mine['applied']}")
            before = theirs["count"]
    if departure:
        unknown = [n for n in departure.ours if n >= len(recorded["ops"])]
        if unknown:
            differs("departure", f"it names operations {unknown}, which the case doesn't have")


def _check(
    theirs,
    mine,
    wanted,
    summary,
):
    summary.operations += 1
    if wanted is not None:
        summary.departures += 1
        problem = disagreement(wanted, mine, any_error=False)
        if problem:
            return f"a departure, but not the one that is written down: {problem}"
        if disagreement(theirs, mine, any_error=True) is None:
            return "this is no departure any more: TensorFlow does the same"
        return None
    problem = disagreement(theirs, mine, any_error=True)
    for a, b in zip(_arrays(theirs), _arrays(mine), strict=False):
        summary.arrays[a["dtype"]] += 1
        summary.identical[a["dtype"]] += identical(decode(a), decode(b))
    return problem


def replay(cases, client, storage, *, sparing=False):
    """Replays recorded cases on an otherwise empty database, which is emptied after each of them."""
    summary = Summary()
    for case in cases:
        if case.get("api") == "raw" and storage != "in_place":
            # raw_ops have no limits: small gradients are added in place.
            continue
        ours = CaseRun(case, client, storage, sparing=sparing).outcomes()
        compare(case, ours, summary)
    return summary
