"""Sends requests that are executed once at most, whatever breaks, and whose sender learns whether they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redisacc._clients import Client, Clients
from redisacc._link import Link
from redisacc._scripts import Counted, ForgottenError, Scripts
from redisacc.errors import DataLossError, OutcomeUnknownError, RedisAccError, ServerUnavailableError


@dataclass(slots=True)
class Attempt:
    """A request that may be sent any number of times.

    Attributes:
        send: sends it as a request of this client with this number.
        finish: makes of its outcome what the caller gets.
        worker: in whose name.
        what: how an error calls it.
    """

    send: Callable[[Client, int], Counted]
    finish: Callable[[Counted], Any]
    worker: str
    what: str


class Requests:
    """Sends the requests of one handle."""

    def __init__(self, link: Link, scripts: Scripts, clients: Clients) -> None:
        self._link = link
        self._scripts = scripts
        self._clients = clients

    def execute(self, attempt: Attempt) -> Any:
        """Sends a new request, and returns what it came to.

        Raises:
            OutcomeUnknownError: the server may have executed it, or may yet. Its ``retry()`` goes on.
            RedisAccError: it was not executed, and no copy of it ever will be.
        """
        client = self._clients.borrow()
        try:
            value = self._settled(attempt, client, client.next(), self._link.lost)
        except (OutcomeUnknownError, DataLossError):
            # Another request of this client would make the outcome unknowable, so it stays with that error. And data
            # loss is said once: what the client remembers is gone, so the next request comes from a new one.
            raise
        except BaseException:
            self._clients.give_back(client)
            raise
        self._clients.give_back(client)
        return value

    def _settled(self, attempt: Attempt, client: Client, sequence: int, lost: int) -> Any:
        """Sends until the outcome is known. ``lost``: the link's count from before the first copy."""
        while True:
            try:
                counted = attempt.send(client, sequence)
            except DataLossError:
                raise
            except ForgottenError as error:
                if not client.was_idle():
                    raise DataLossError(
                        f"{attempt.what}: the server has acknowledged earlier requests of this client, and knows "
                        "nothing of it any more: it was restarted from older data, failed over to a replica that "
                        "lagged behind, or evicted keys. This request was not executed; those that come now will be"
                    ) from error
                if self._link.lost != lost:
                    raise self._unknown(attempt, client, sequence, error) from error
                # It was idle for long, and this is its first request since: it goes on as somebody new.
                client.begin_anew(error.now_ms)
                sequence = client.next()
            except ServerUnavailableError as error:
                if self._link.lost == lost:
                    raise
                raise self._unknown(attempt, client, sequence, error) from error
            except RedisAccError as error:
                if self._link.lost == lost:
                    raise
                # This copy was refused. But one that was lost before may have been executed, or may be on its way
                # still, to be executed when nothing stands against it any more.
                try:
                    settled = self._scripts.settle(client=client, sequence=sequence, worker=attempt.worker)
                except RedisAccError as failure:
                    raise self._unknown(attempt, client, sequence, failure) from error
                if settled is None:
                    raise
                counted = settled
                break
            else:
                break
        client.learn(sequence)
        return attempt.finish(counted)

    def _unknown(self, attempt: Attempt, client: Client, sequence: int, error: RedisAccError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{attempt.what}: it is not known whether the server has executed this. retry() of this error sends the "
            f"same request again, which is executed once however often it is sent ({error})",
            # No number that the link can have: copies are about, whatever it says.
            lambda: self._settled(attempt, client, sequence, -1),
        )
