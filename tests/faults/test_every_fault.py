"""Every operation meets every fault, wherever that can happen: it is done once, or at most once, and nothing is left.

A caller that is still there knows the outcome. One that is interrupted learns it. Requests that arrive late change
nothing.
"""

import itertools

import pytest
from faults import FAULTS
from operations import OPERATIONS, operation
from support.servers import CLUSTER

# A cluster adds nothing to what a signal, or the end of a process, does to a call.
ON_CLUSTERS = ("broken", "late", "bytewise", "flushed", "suspended")
pytestmark = pytest.mark.servers("valkey", CLUSTER)

# The operations that `make test` lets meet a fault. Others differ less from those of their kind.
USUAL = {
    "broken": [
        *("apply", "apply in partitions", "apply large", "apply rows", "make room in partitions", "take"),
        *("take in partitions", "take in a block", "take a tree in parts", "recover", "open", "delete in parts"),
        *("stream", "publish in partitions", "read"),
    ],
    "late": [
        *("apply", "apply in partitions", "apply again", "apply stale", "apply refused", "make room", "take"),
        *("take in parts", "take in vain with a grace", "recover", "set the step", "delete", "publish"),
    ],
    "bytewise": ["apply inline", "take", "read"],
    "flushed": ["apply", "make room in partitions", "take in parts", "recover", "publish"],
    "interrupted": [
        *("apply", "apply in partitions", "make room in parts", "take", "wait in vain for a round", "set the step"),
        *("listen", "open", "publish the first", "wait in vain for a version"),
    ],
    "interrupted by OSError": ["apply in parts", "take", "read in partitions"],
    "cancelled": [
        *("apply in parts", "take in partitions", "take in a block", "open a private one", "delete parameters"),
    ],
    "killed": [
        *("apply", "apply in partitions", "make room in partitions", "take", "open", "stream in partitions"),
        *("publish in partitions", "step"),
    ],
    "stopped": ["apply inline", "take inline"],
    "suspended": [
        *("apply in partitions", "take in parts", "open", "make room in partitions", "publish in partitions"),
        "step in partitions",
    ],
    "forked": ["apply in parts", "publish"],
}
# The same with `make check`.
SLOW = [
    *itertools.product(
        ["suspended"], ["apply in parts", "recover in parts", "open an existing one", "publish", "stream"]
    ),
    *itertools.product(
        ["killed"], ["apply a tree in parts", "take a tree in parts", "take inline", "publish", "recover", "delete"]
    ),
    *itertools.product(
        ["broken"],
        [
            *("apply encoded", "apply in parts", "apply a tree in parts", "take inline", "take large", "take in vain"),
            *("set the step", "look", "publish large", "delete parameters", "step"),
        ],
    ),
    *itertools.product(
        ["late"],
        [
            *("apply inline", "apply in parts", "apply late", "make room in parts", "take in vain", "open"),
            *("set the quorum", "delete parameters"),
        ],
    ),
    *(("flushed", "set the step"), ("flushed", "delete"), ("forked", "take"), ("killed", "set the step")),
    *itertools.product(["interrupted"], ["apply again", "recover", "publish", "read"]),
    *itertools.product(["cancelled"], ["look", "delete", "publish in partitions"]),
    *(("interrupted by TimeoutError", "take"), ("interrupted by ConnectionResetError", "apply in parts")),
    *(("interrupted by TimeoutError over TLS", "take"), ("cancelled", "stream")),
    *itertools.product(
        ["forked while locked"],
        [
            *("apply in partitions", "apply rows", "apply a tree", "take", "recover", "look", "set the step", "listen"),
            *("open a private one", "publish", "read", "wait in vain for a version"),
        ],
    ),
]


def cases():
    """Yields all faults and operations that fit together, as parameters."""
    for fault, name in itertools.product(FAULTS, OPERATIONS):
        if fault.startswith(OPERATIONS[name].never):
            continue
        marks = [] if fault in ON_CLUSTERS else [pytest.mark.servers("valkey")]
        if (fault, name) in SLOW:
            marks.append(pytest.mark.slow)
        elif name not in USUAL.get(fault, ()):
            marks.append(pytest.mark.thorough)
        yield pytest.param(fault, name, marks=marks)


@pytest.mark.parametrize(("fault", "name"), list(cases()))
def test_an_operation_meets_a_fault_anywhere(everywhere, fault, name):
    ends = {outcome.how for outcome in everywhere(FAULTS[fault], lambda: operation(name))}
    assert "over" in ends or not fault.startswith(("interrupted", "cancelled"))
