"""Compares redisacc with TensorFlow, live, on random sequences of operations.

`python tests/conformance/live.py --tensorflow-python PATH`, where PATH is a Python that has tensorflow-cpu.
Every sequence goes through TensorFlow and through redisacc on an embedded server, in both ways of storing a
gradient; results must be the same bit for bit. A sequence that differs is shrunk before it is printed.
"""

import argparse
import json
import random
import sys
import time

import redis
from arraycode import decode, is_array
from replay import CaseRun, Summary, compare
from sequences import sequences
from tensorflow_process import TensorFlowProcess

from redisacc.embedded import Server

EXACT_STORAGES = ("in_place", "buffered_inline")
FORMS = 8  # two kinds by two dtypes by two reductions: sequences() makes one of each for every number
BLOCKING = 0.01  # TensorFlow needs 0.3 s for every take that blocks
LARGE = 40


def differences(recorded, client, storage, summary):
    """Runs a case, with TensorFlow's outcomes in it, on redisacc; adds to the summary; what differs in it."""
    before = len(summary.differences)
    compare(recorded, CaseRun(recorded, client, storage).outcomes(), summary)
    return summary.differences[before:]


def shrink(case, tensorflow, client, storage):
    """Drops operations, first many at a time, then one, as long as the case still differs."""
    smallest = case
    size = len(case["ops"]) // 2
    while size:
        start = 0
        while start < len(smallest["ops"]):
            fewer = {**case, "ops": smallest["ops"][:start] + smallest["ops"][start + size :]}
            fewer.update(tensorflow.run(fewer))
            if differences(fewer, client, storage, Summary()):
                smallest = fewer
            else:
                start += size
        size //= 2
    return smallest


def readable(value):
    """A coded array as a list, for people; anything else as it is."""
    return f"{value['dtype']} {decode(value).tolist()}" if is_array(value) else value


def explain(case):
    """Prints a case for people, and as one line of JSON for the machine."""
    print(f"api {case.get('api', 'class')}, handles {case['handles']}")
    for number, op in enumerate(case["ops"]):
        print(f"  {number}:", *(f"{key}={readable(value)}" for key, value in op.items()))
    print(json.dumps({key: case[key] for key in case.keys() - {"outcomes", "construction"}}, sort_keys=True))


def random_cases(seed, number):
    """At least `number` sequences, one in eight of them with large gradients."""
    each = -(-number // FORMS)
    large = each // 8
    cases = [
        *sequences("live", seed, each - large, blocking=BLOCKING),
        *sequences("live-large", seed, large, blocking=BLOCKING, scale=LARGE),
    ]
    random.Random(seed).shuffle(cases)
    return cases


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tensorflow-python", required=True, help="a Python that has tensorflow-cpu")
    parser.add_argument("--sequences", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    summaries = {storage: Summary() for storage in EXACT_STORAGES}
    started = time.monotonic()
    with (
        TensorFlowProcess(arguments.tensorflow_python) as tensorflow,
        Server() as server,
        redis.Redis.from_url(server.url) as client,
    ):
        print(f"TensorFlow {tensorflow.version}, seed {seed}", flush=True)
        cases = random_cases(seed, arguments.sequences)
        for number, case in enumerate(cases, 1):
            recorded = {**case, **tensorflow.run(case)}
            for storage, summary in summaries.items():
                found = differences(recorded, client, storage, summary)
                if found:
                    print(f"sequence {number} differs ({storage}); shrinking it", flush=True)
                    smallest = shrink(recorded, tensorflow, client, storage)
                    explain(smallest)
                    again = differences(smallest, client, storage, Summary())
                    print("\n".join(again or [*found, "... but not when it was run once more"]))
                    print(f"seed {seed}, {storage}: TensorFlow against redisacc")
                    return 1
            if number % 100 == 0 or number == len(cases):
                print(f"{number} of {len(cases)} sequences, {time.monotonic() - started:.0f} s", flush=True)
    for storage, summary in summaries.items():
        print(f"{storage}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
