"""Patience with a server that does not answer."""

from types import SimpleNamespace

from redisacc._training.participant import Patience
from redisacc.errors import ServerUnavailableError


def test_an_outage_may_last_for_any_number_of_attempts():
    """redis-py's backoff overflows after 1,023."""
    pauses = []

    def attempt():
        if len(pauses) < 1100:
            raise ServerUnavailableError("no Redis server answers")
        return "there"

    patience = Patience(None, "train", SimpleNamespace(sleep=pauses.append))
    assert patience.call(attempt, "to look") == "there"
    assert pauses[0] < max(pauses) == pauses[-1] == 1.0
