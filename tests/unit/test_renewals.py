"""One thread for each transport renews the leases that this process holds over it."""

import threading

from redisacc._protocol.leases.renewals import renewals_over


class Server:
    """Stands for a transport: renewals only tell one from another."""


class Held:
    """A lease that counts its renewals."""

    interval = 0.002

    def __init__(self, server, blocks=None):
        self.is_over = False
        self.renewed = 0
        self._blocks = blocks
        self.renewals = renewals_over(server)
        self.renewals.add(self)

    def renew(self):
        self.renewed += 1
        if self._blocks is not None:
            self._blocks.wait()

    def end(self):
        self.is_over = True
        self.renewals.drop_ended()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "redisacc-leases"]


def test_leases_are_renewed_until_they_are_over(until):
    server = Server()
    first, second = Held(server), Held(server)
    until(lambda: first.renewed > 3 and second.renewed > 3)
    assert len(threads()) == 1
    first.end()
    ended, going_on = first.renewed, second.renewed
    until(lambda: second.renewed > going_on + 3)
    assert first.renewed <= ended + 1
    second.end()
    until(lambda: threads() == [])
    # A thread begins again with the next lease.
    third = Held(server)
    until(lambda: third.renewed > 1)
    third.end()


def test_a_silent_server_delays_no_lease_on_another(until):
    silence = threading.Event()
    silent, server = Server(), Server()
    waiting, lease = Held(silent, silence), Held(server)
    until(lambda: waiting.renewed == 1 and lease.renewed > 3)
    assert (waiting.renewed, len(threads())) == (1, 2)
    silence.set()
    waiting.end()
    lease.end()


def test_a_lease_that_is_lost_while_others_are_held_is_dropped(until):
    server = Server()
    lost, held = Held(server), Held(server)
    until(lambda: lost.renewed > 1)
    # Nobody says so to the thread.
    lost.is_over = True
    number, going_on = lost.renewed, held.renewed
    until(lambda: held.renewed > going_on + 3)
    assert lost.renewed <= number + 1
    held.end()
