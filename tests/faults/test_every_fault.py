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
        *("apply", "apply in parts", "apply in partitions", "apply large", "apply rows", "make room in partitions"),
        *("take", "take in partitions", "take large", "take in a block", "take in vain", "take a tree in parts"),
        *("recover", "set the step", "look", "open", "delete in parts", "stream", "publish in partitions", "read"),
        "delete parameters",
    ],
    "late": [
        *("apply", "apply inline", "apply in parts", "apply in partitions", "apply again", "apply stale"),
        *("apply late", "apply refused", "make room", "make room in parts", "take", "take in parts"),
        *("take in vain", "take in vain with a grace", "recover", "set the step", "set the quorum", "open"),
        *("delete", "publish", "delete parameters"),
    ],
    "bytewise": ["apply inline", "take", "read"],
    "flushed": ["apply", "make room in partitions", "take in parts", "recover", "set the step", "publish", "delete"],
    "interrupted": [
        *("apply", "apply in partitions", "apply again", "make room in parts", "take", "recover"),
        *("wait in vain for a round", "set the step", "listen", "open", "publish", "publish the first", "read"),
        "wait in vain for a version",
    ],
    "interrupted by OSError": ["apply in parts", "take", "read in partitions"],
    "cancelled": [
        *("apply in parts", "take in partitions", "take in a block", "look", "open a private one", "delete"),
        "delete parameters",
    ],
    "killed": [
        *("apply", "apply large", "apply in partitions", "make room in partitions", "take", "take in partitions"),
        *("set the step", "open", "stream in partitions", "publish in partitions"),
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
    *itertools.product(["broken"], ["apply encoded", "take inline", "apply a tree in parts", "publish large"]),
    *(("forked", "take"), ("cancelled", "publish in partitions")),
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
