"""The states of the workers of a training: everything that names them says the same at the same moment."""

import hashlib
import json
import re
import threading
import time
import urllib.request

import numpy as np
import pytest
from click.testing import CliRunner
from support.exporter import Exporter

import redisacc
from redisacc.tools.cli import main

WANTED = {"in the round": ["worker 0"], "expected": ["worker 1"], "late": ["worker 2"], "gone": ["worker 3"]}


@pytest.fixture
def exporter(real_server):
    found = Exporter(real_server.url)
    yield found
    found.stop()


HOWS = {
    "updates": {"optimizer": redisacc.optim.SGD(0.1)},
    "rounds": {"update": lambda taken, parameters, state: (parameters, state)},
}


@pytest.mark.slow(keep="updates")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.servers("valkey")
def test_in_a_healthy_training_no_worker_is_missing_nor_when_it_is_finished(
    real_server, real_client, background, exporter, how
):
    ends = threading.Barrier(4)

    def work(number):
        model = {"w": np.zeros(100, np.float32)}
        with redisacc.Training(
            "train", model, workers=3, number=number, redis=real_server.url, **HOWS[how]
        ) as training:
            for _, weights in training.steps(until=15):
                time.sleep(0.01 * (1 + number))
                training.apply(weights)
            ends.wait(60)

    exporter.scrape()
    working = [background(work, number) for number in range(3)]
    found, last = [], []
    while 'redisacc_finished{accumulator="train"} 1.0' not in last:
        last = exporter.scrape()
        found += last
    ends.wait(60)
    for each in working:
        each.result()
    # They left ten minutes ago.
    for session, entry in real_client.hgetall("redisacc:{train}:sessions").items():
        fields = entry.split(b" ", 7)
        fields[4] = b"%d" % (int(fields[4]) - 600_000)
        real_client.hset("redisacc:{train}:sessions", session, b" ".join(fields))
    real_client.hincrby("redisacc:{train}", "applied", 1)
    last = exporter.scrape()
    missing = ("redisacc_missing_workers{", "redisacc_worker_missing{")
    numbers = [line.split()[-1] for line in [*found, *last] if line.startswith(missing)]
    assert len(numbers) > 6
    assert set(numbers) == {"0.0"}
    assert 'redisacc_gone_workers{accumulator="train"} 3.0' in last
    assert cli("rm", "train", "--yes", "--redis", real_server.url).exit_code == 0


def cli(*words):
    return CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)


@pytest.mark.forges
def test_everything_names_the_same_state_at_the_same_moment(training, real_server, real_client, exporter):
    """Each place says what the table says: log, error, info(), show, watch, the metrics and the page."""
    training.chief(workers=4)
    seconds, micros = real_client.time()
    now = seconds * 1000 + micros // 1000
    # At step 1, worker 0 contributed 30 s ago, and worker 2 was seen 20 s before that.
    lease = 600_000
    planted = ((30_000, 1, lease), (10_000, 1, lease), (50_000, 0, lease), (50_000, 0, -lease))
    for number, (ms, step, left) in enumerate(planted):
        entry = f"1 applied {step} 1 {now - ms} 1 0 worker {number}"
        real_client.hset("redisacc:{train}:sessions", f"{now - 60_000}-{number:x}", entry)
        training.give_lease(f"worker {number}", f"host:{number}", left)
    real_client.hset("redisacc:{train}:workers", "worker 0", "1")
    real_client.hset("redisacc:{train}", mapping={"num_accumulated": "1", "applied": "4", "global_step": "1"})
    absent = {state: names for state, names in WANTED.items() if state != "in the round"}

    accumulator = training.gradients()
    with pytest.raises(redisacc.TakeTimeoutError) as caught:
        accumulator.take_grad(4, timeout=0)
    error = caught.value
    assert list(error.workers) == WANTED["in the round"]
    assert {"expected": error.expected, "late": error.late, "gone": error.gone} == absent
    clauses = dict(clause.split(": ", 1) for clause in str(error).split("; ")[1:])
    assert {state: re.findall(r"worker \d", text) for state, text in clauses.items()} == WANTED

    info = accumulator.info()
    assert {state: [one.name for one in workers] for state, workers in info.states.items()} == WANTED
    assert [[one.name for one in of] for of in (info.expected, info.late, info.gone)] == list(absent.values())

    url = ["--redis", real_server.url]
    shown = json.loads(cli("show", "train", "--json", *url).stdout)
    assert {state: shown[state] for state in absent} == absent
    table = re.findall(r"^  (worker \d) +(1|[a-z]+) ", cli("show", "train", *url).stdout, re.MULTILINE)
    assert dict(table) == {"worker 0": "1", "worker 1": "expected", "worker 2": "late", "worker 3": "gone"}

    watched = json.loads(cli("watch", "train", "-n", 1, "--json", *url).stdout)
    assert {state: watched[state] for state in absent} == absent
    line = cli("watch", "train", "-n", 1, *url).stdout
    assert {state: re.findall(rf"  {state}: (worker \d) \(", line) for state in absent} == absent

    lines = exporter.scrape()
    for name, number in (("", 1), ("expected_", 1), ("late_", 1), ("gone_", 1), ("missing_", 2)):
        assert f'redisacc_{name}workers{{accumulator="train"}} {number}.0' in lines
    for worker, missing in enumerate((0, 0, 1, 1)):
        assert f'redisacc_worker_missing{{accumulator="train",worker="worker {worker}"}} {missing}.0' in lines

    name = hashlib.sha256(b"train").hexdigest()[:16]
    with urllib.request.urlopen(f"{exporter.url}updates?detail={name}", timeout=20) as events:
        page = json.loads(next(line for line in events if line.startswith(b"data: "))[6:])["changed"]
    rows = page["detail:workers"]["rows"]
    assert {state: [row[0] for row in rows if row[3] == state] for state in WANTED} == WANTED
    assert (page[f"row:{name}"]["late"], page["server"]["late"], page["server"]["gone"]) == (1, 1, 1)


def test_a_worker_that_gives_its_lease_back_is_gone_at_once(training, background):
    chief = training.chief(workers=1)
    ann, bob = training.worker(0), training.worker(1)
    leading = background(training.lead, chief, 1)
    next(ann.steps())
    ann.apply({"w": [1, 1]})
    leading.result()
    accumulator = training.gradients()
    assert [one.name for one in accumulator.info().expected] == ["worker 1", "worker 0"]
    ann.close()
    assert [one.name for one in accumulator.info().gone] == ["worker 0"]
    bob.close()
