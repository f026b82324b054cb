"""What `redisacc doctor` finds out about reducers."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._clock import durations
from redisacc._format.buffered import ANNOUNCED_BYTES
from redisacc._format.keys import Keys
from redisacc._format.record import Record
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.sums.part_sums import WORTHWHILE
from redisacc._text import QUOTED, listed, printable
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, NotFoundError, ServerError
from redisacc.tools.admin.catalog import list_names
from redisacc.tools.admin.rows import read_spec
from redisacc.tools.cli.checks import Finding, ok
from redisacc.tools.monitoring.facts import bytes_text, count_text

# Maximum number of accumulators that a finding names.
_NAMED = 3

# An accumulator on which a reducer works, or would work if there were one; and the number of bytes of the dense arrays
# of a gradient, 0 if that is unknown.
_Case = tuple[AccumulatorInfo, int]


def examine_reducers(transport: Transport) -> Finding:
    """Returns whether reducers work where they pay off, and keep up. Private accumulators do not count.

    The status is always "ok", because a reducer only saves time.

    Args:
        transport: the way to the server, or the cluster.
    """
    try:
        cases = list(_cases(transport))
    except ServerError:
        return ok("unknown, because this user may not list and read all accumulators")
    on = [(case, reducer) for case in cases if (reducer := case[0].reducer) is not None]
    without = [case for case in cases if case[0].reducer is None]
    idle = datetime.timedelta(seconds=durations.idle)
    advice = ""
    if lacking := [case for case, reducer in on if reducer.missing]:
        found = f"none works on some partitions of {_named(lacking)}, so takers use none of the others"
        advice = "run `redisacc reduce --node HOST:PORT` on the machine of each node of the cluster"
    elif late := [case for case, reducer in on if not reducer.keeps_up]:
        found = f"too late for most rounds of {_named(late)}"
        advice = "give the reducer a processor core of its own, and let it connect over a Unix socket"
    elif active := [case for case in without if case[0].read_at - case[0].last_activity <= idle]:
        found = f"none works on {_named(active)}"
        advice = (
            "if takers run on other machines than the server, run `redisacc reduce` on the server's machine, or start "
            "both with `redisacc server --reduce`: takers then fetch one sum instead of every gradient"
        )
    elif on:
        in_time = sum(reducer.stored for _, reducer in on)
        rounds = count_text(in_time + sum(reducer.late for _, reducer in on), "round")
        found = f"work on {_named([case for case, _ in on])}, and were in time for {in_time} of {rounds}"
    elif without:
        found = f"unknown, because nothing has happened to {_named(without)} for {durations.idle:g} seconds"
        advice = "run doctor again during the run"
    else:
        found = "not needed, because no take has waited for several large dense gradients"
    return ok(found, advice)


def _named(cases: Sequence[_Case]) -> str:
    return listed(
        cases,
        _NAMED,
        lambda case: printable(case[0].name, QUOTED) + (f" (gradients of {bytes_text(case[1])})" if case[1] else ""),
    )


def _cases(transport: Transport) -> Iterator[_Case]:
    for name in list_names(transport):
        keys = Keys(name)
        try:
            info = read_info(transport, keys)
            if info.kind == "sparse":
                continue
            spec = read_spec(transport, keys)
        except (NotFoundError, CorruptDataError):
            # `redisacc ls` reports what is wrong with it.
            continue
        nbytes, sum_bytes = _sizes(info, spec)
        wanted = Record.parse_wanted(transport.call(*Record.wanted_command(keys)))
        # A reducer works under the same conditions.
        if info.reducer is not None or (nbytes >= ANNOUNCED_BYTES and wanted * nbytes > WORTHWHILE * sum_bytes):
            yield info, nbytes


def _sizes(info: AccumulatorInfo, spec: AccumulatorSpec) -> tuple[int, int]:
    """Returns the bytes of the dense arrays of a gradient, and of their sum; zeros if their shape is unknown.

    Gradients that are buffered show whether they are encoded. While there are none, they are taken to be whole.
    """
    shape = info.round_shape
    if shape is None:
        declared = info.shape if info.kind == "dense" else ()
        if declared is None or None in declared:
            return 0, 0
        shape = tuple(dim for dim in declared if dim is not None)
    sections = [
        (section.dtype, math.prod(section_shape))
        for section, section_shape in zip(spec.sections, spec.section_shapes(shape), strict=True)
        if not section.is_sparse
    ]
    nbytes = sum(size * dtype.storage.itemsize for dtype, size in sections)
    if info.buffered:
        nbytes = min(nbytes, info.buffered_bytes // info.buffered)
    return nbytes, sum(size * dtype.sum.itemsize for dtype, size in sections)
