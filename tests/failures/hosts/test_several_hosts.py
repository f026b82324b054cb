"""`redisacc run --hosts` on hosts that are cut off or lose their power: network namespaces, so root on Linux."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.until import until

pytestmark = pytest.mark.thorough

NAMES = ("a", "b", "c")
UNTIL = 400
PATIENCE = 90.0

TRAINING = """
import sys, time
import numpy as np
import redisacc

with redisacc.Training("hosts", {"w": np.zeros(2)}, optimizer=redisacc.optim.SGD(0.1)) as training:
    for step, weights in training.steps(until=int(sys.argv[1])):
        time.sleep(0.02)
        training.apply({"w": weights["w"] + step})
        if step % 20 == 0:
            print("step", step)
    print(training.latest()[1]["w"].tolist())
"""


class Hosts:
    """Hosts in network namespaces, each with one `redisacc run`."""

    def __init__(self, network, folder):
        self.network = network
        self._folder = folder
        self._runs = {}
        (folder / "train.py").write_text(TRAINING)

    def start(self, name):
        """Starts the command on a host; its output is added to what the host has said before."""
        meet = f"{self.network.address('a')}:6400"
        # Processes of one machine know each other by its name and their process ids.
        machine = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        command = [sys.executable, "-m", "redisacc", "run", "--hosts", str(len(NAMES)), "--meet", meet]
        command += ["--replicas", "1", "--workers", "1", "--", sys.executable, "train.py", str(UNTIL)]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._runs[name] = subprocess.Popen(
                [*self.network.command(name), *machine, *command],
                cwd=self._folder,
                env={**os.environ, "REDISACC_PASSWORD": "secret", "REDISACC_URL": ""},
                stdout=log,
                stderr=log,
            )

    def said(self, name):
        return (self._folder / f"{name}.log").read_text()

    def wait_for(self, name, text):
        def has_said():
            ended = self._runs[name].poll() is not None
            found = text in self.said(name)
            assert found or not ended, self.said(name)
            return found

        until(has_said, PATIENCE, details=lambda: (name, text, self.said(name)))

    def kill(self, name):
        """Kills everything on a host at once, as if its power failed."""
        command = ["ip", "netns", "pids", self.network.command(name)[-1]]
        while pids := subprocess.run(command, check=True, capture_output=True, text=True).stdout.split():
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._runs[name].wait()

    def code(self, name):
        return self._runs[name].wait(PATIENCE)

    def end(self):
        for name in self._runs:
            self.kill(name)


@pytest.fixture
def hosts(tmp_path):
    from benchmarks.network import hosts as network

    if reasons := network.obstacles():
        pytest.skip(" ".join(reasons))
    try:
        with network.Hosts(NAMES, 1) as built:
            made = Hosts(built, tmp_path)
            try:
                yield made
            finally:
                made.end()
    except network.HostsError as error:
        pytest.skip(f"the system refuses network namespaces: {error}")


def test_hosts_that_are_cut_off_or_lose_their_power_train_on(hosts):
    """A cable is pulled and plugged in again; another host loses its power and returns. The bits are the same."""
    for name in NAMES:
        hosts.start(name)
    for name in NAMES:
        hosts.wait_for(name, "| step 20\n")
    hosts.network.cut_off("c")
    for name in "ab":
        hosts.wait_for(name, "host c is gone")
    hosts.wait_for("c", "does not answer")
    hosts.network.connect("c")
    for name in NAMES:
        hosts.wait_for(name, "host c is back" if name != "c" else "answers again")
    hosts.kill("b")
    hosts.start("b")
    for name in "ac":
        hosts.wait_for(name, "host b is back")
    assert [hosts.code(name) for name in NAMES] == [0, 0, 0], [hosts.said(name) for name in NAMES]
    weights = np.zeros(2)
    for step in range(UNTIL):
        weights -= 0.1 * (weights + step)
    for name in NAMES:
        said = hosts.said(name)
        assert f"| {weights.tolist()}\n" in said
        assert "secret" not in said
        assert "the cluster of 6 nodes is ready: workers 0 to 2" in said
