"""A server that cannot be started again is tried as often as restarts allow."""

import pytest

from redisacc.errors import ServerError
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.server_keeper import ServerKeeper


class Prompt(Restarts):
    """Restarts without pauses."""

    def pause_after(self, lived, now):
        return None if super().pause_after(lived, now) is None else 0.0


class FailingServer:
    """A server that was killed, and whose starts have these outcomes, one after the other.

    An outcome is a message, an exit status after which it has ended already, or None if it runs.
    """

    pid = 7

    def __init__(self, *outcomes):
        self.running = False
        self.exit_status = -9
        self._outcomes = [*outcomes]

    def start(self):
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, str):
            raise ServerError(outcome)
        self.running, self.exit_status = outcome is None, outcome

    def log_tail(self, _):
        return ""


@pytest.fixture
def texts(until):
    """Looks after a server until it runs or the run is over, and returns what there is to say."""

    def look(server, limit):
        keeper = ServerKeeper(server, Prompt(limit), keeps_data=True, name="it")
        found = [keeper.look()]
        while "has restarted" not in found[-1].text and found[-1].code is None:
            found.append(until(keeper.look))
        return [text for text, *_ in found]

    return look


KILLED = (
    "it was killed by SIGKILL, by somebody or by the kernel for lack of memory, which `dmesg` reports. It has logged "
    "nothing since it was ready"
)
AGAIN = ". It restarts"


def test_a_start_that_fails_is_tried_again(texts):
    assert texts(FailingServer("no room", -9, "no host", None), 4) == [
        KILLED + AGAIN,
        "it could not be restarted: no room" + AGAIN,
        KILLED + AGAIN,
        "it could not be restarted: no host" + AGAIN,
        "it has restarted as process 7",
    ]


def test_the_last_error_ends_the_run_when_no_restart_is_left(texts):
    failed = "it could not be restarted: "
    assert texts(FailingServer("no room", "no port"), 2) == [
        KILLED + AGAIN,
        failed + "no room" + AGAIN,
        failed + "no port",
    ]
    assert texts(FailingServer(-9), 1)[1:] == [KILLED]
    assert texts(FailingServer(), 0) == [KILLED]


def test_a_server_that_is_shut_down_as_soon_as_it_is_back_stays_so(texts):
    assert texts(FailingServer(0), 5)[1:] == ["it ended with exit code 0. It has logged nothing since it was ready"]
