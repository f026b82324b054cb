"""The host of a process that leads is cut off, or loses its power: another host's takes over, with the same bits."""

import hashlib
import time

import pytest
from member import BEGIN, CREW, OPTIMIZER
from support.local_updates import LocalTraining, gradient_of
from support.until import until

pytestmark = pytest.mark.thorough

UNTIL = 12
# The lease of a chief, in seconds.
LEASE = 10.0
# The step at which the host of the chief is cut off, and one that only its successor can reach.
CUT, LATER = 4, 8
# Seconds for what a takeover needs besides the lease: the rest of the last renewal, and the first requests.
MARGIN = 5.0


def expected(role):
    """Returns the digest of the parameters that an undisturbed training ends with."""
    if role != "rounds":
        weights = LocalTraining(OPTIMIZER, BEGIN, weights=(1.0,) * CREW).train(UNTIL).parameters["w"]
    else:
        weights = BEGIN["w"]
        for step in range(UNTIL):
            first, second = [gradient_of(number, step, {"w": weights})["w"] for number in range(CREW)]
            weights = weights - (first + second) / CREW
    return hashlib.sha256(weights.tobytes()).hexdigest()


@pytest.fixture
def workers(site):
    """Starts the workers; they are on a host that stays."""
    return lambda: [site.start("workers", "worker", UNTIL) for _ in range(CREW)]


@pytest.mark.parametrize("publishes", ["after it returned", "into the cut"])
@pytest.mark.parametrize("role", ["updates", "rounds"])
def test_a_chief_that_is_cut_off_is_followed_and_cannot_publish(role, publishes, site, workers):
    first = site.start("first", role, UNTIL, "--hold", str(CUT))
    first.wait_for("leads")
    second = site.start("second", role, UNTIL, "--hold", str(LATER))
    crew = workers()
    first.wait_for("holds", CUT)
    assert second.told("is the chief; standing by to follow it")
    site.cut_off("first")
    began = time.monotonic()
    if publishes == "into the cut":
        # The kernel keeps what it sends, and sends it again when the host is back.
        first.continues()
    assert int(second.wait_for("leads")[1]) == CUT
    assert time.monotonic() - began < LEASE + 1 + MARGIN
    second.wait_for("holds", LATER)
    site.connect("first")
    if publishes == "after it returned":
        first.continues()
    lost = first.wait_for("lost")
    assert "the chief" in " ".join(lost)
    assert first.process.wait(30) == 0
    second.continues()
    assert second.wait_for("ends")[1:] == [str(UNTIL), expected(role)]
    assert [one.wait_for("ends") and one.process.wait(30) for one in crew] == [0, 0]


def test_a_host_that_lost_its_power_stands_by_when_it_is_back(site, workers):
    first = site.start("first", "updates", UNTIL, "--hold", str(CUT))
    first.wait_for("leads")
    second = site.start("second", "updates", UNTIL, "--hold", str(LATER))
    crew = workers()
    first.wait_for("holds", CUT)
    # Nothing tells the server, and nobody on another host, that its processes died.
    site.cut_off("first")
    first.process.kill()
    began = time.monotonic()
    second.wait_for("leads", CUT)
    assert time.monotonic() - began < LEASE + 1 + MARGIN
    second.wait_for("holds", LATER)
    site.connect("first")
    third = site.start("first", "updates", UNTIL)
    until(lambda: third.told("is the chief; standing by to follow it"))
    # Now the other host dies.
    site.cut_off("second")
    second.process.kill()
    third.wait_for("leads", LATER)
    assert third.wait_for("ends")[1:] == [str(UNTIL), expected("updates")]
    assert [one.wait_for("ends") and one.process.wait(30) for one in crew] == [0, 0]


def test_a_training_whose_leading_host_is_cut_off_continues_when_another_host_leads(site):
    every = {host: site.start(host, "training", UNTIL, "--hold", str(CUT)) for host in ("first", "second")}
    for one in every.values():
        one.wait_for("holds", CUT)
    leads = next(host for host, one in every.items() if not one.told("standing by to follow it"))
    (other,) = every.keys() - {leads}
    site.cut_off(leads)
    every[other].continues()
    until(lambda: every[other].told("continuing at step"), LEASE + 1 + MARGIN)
    site.connect(leads)
    every[leads].continues()
    for one in every.values():
        assert one.wait_for("ends")[1:] == [str(UNTIL), expected("training")]
        assert one.process.wait(30) == 0
    assert every[leads].told("standing by")
