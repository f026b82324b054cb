"""Uses the redisacc that is installed: `make release` runs this in fresh environments (`.ci/release.py`).

Usage: python smoke.py VERSION EXTRA…

It checks what a user would try first, with the extras that the environment has, and needs a server program on the
machine: the extra `server`, or the environment variable REDISACC_SERVER.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

import redisacc
from redisacc.embedded import Server

COMMAND = str(Path(sysconfig.get_path("scripts")) / "redisacc")
TIMEOUT = 60.0  # seconds, for each process

# Run by two processes. Both end with the weights that two halves of the data lead to.
TRAIN = """
import sys
import numpy as np
import redisacc

number = int(sys.argv[1])
with redisacc.Training("smoke", {"w": np.zeros(2)}, optimizer=redisacc.optim.SGD(0.5), workers=2) as training:
    for step, weights in training.steps(until=20):
        training.apply({"w": weights["w"] - [1.0, 2.0 * training.number]}, metrics={"loss": 1.0})
    step, weights = training.latest()
    print(step, weights["w"].round(3).tolist())
"""


def check_accumulators(url: str) -> None:
    """Adds up dense and sparse gradients, small and large ones."""
    for size in (2, 100_000):
        with redisacc.ConditionalAccumulator(np.float32, shape=[size], shared_name=f"dense-{size}", redis=url) as dense:
            assert dense.apply_grad(np.full(size, 1.0), local_step=0)
            assert dense.apply_grad(np.full(size, 3.0), local_step=0)
            assert np.array_equal(dense.take_grad(2), np.full(size, 2.0, np.float32))
            assert not dense.apply_grad(np.zeros(size), local_step=0)
            dense.delete()
    with redisacc.SparseConditionalAccumulator(np.float32, shape=[10, 2], shared_name="sparse", redis=url) as sparse:
        sparse.apply_grad([3, 7], [[1.0, 2.0], [3.0, 4.0]], local_step=0)
        indices, values, _shape = sparse.take_grad(1)
        assert indices.tolist() == [3, 7]
        assert values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        sparse.delete()


def check_training(url: str) -> None:
    """Two processes train together."""
    command = [sys.executable, "-c", TRAIN]
    environment = {**os.environ, "REDISACC_URL": url}
    running = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    results = [process.communicate(timeout=TIMEOUT)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert results == ["20 [1.0, 1.0]"] * 2, results


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command `redisacc`."""
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT)


def check_command(url: str, version: str) -> None:
    """Looks into the training with the command line."""
    assert version in command("--version").stdout
    shown = command("show", "smoke", "--redis", url)
    assert shown.returncode == 0, shown.stderr
    assert "smoke" in shown.stdout
    checked = command("doctor", "--redis", url)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    started = command("run", "--workers", "1", "--server", "--", sys.executable, "-c", "print('works')")
    assert started.returncode == 0, started.stderr
    assert "works" in started.stdout


def check_asyncio(url: str) -> None:
    """Applies and takes on an event loop."""
    import redisacc.asyncio

    async def use() -> None:
        accumulator = redisacc.asyncio.ConditionalAccumulator(np.float32, shape=[2], shared_name="loop", redis=url)
        async with accumulator:
            await accumulator.apply_grad([1.0, 2.0], local_step=0)
            assert (await accumulator.take_grad(1)).tolist() == [1.0, 2.0]

    asyncio.run(use())


def check_checkpoint(url: str) -> None:
    """Writes the training into a file, and publishes it under another name."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "smoke.safetensors")
        for arguments in (("checkpoint", "smoke", file), ("restore", "restored", file)):
            done = command(*arguments, "--redis", url)
            assert done.returncode == 0, done.stderr


def check_serve(url: str) -> None:
    """Reads the page and the metrics once."""
    arguments = [COMMAND, "serve", "--port", "0", "--redis", url]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            address = next(word for word in serving.stdout.readline().split() if word.startswith("http://"))
            for path, expected in (("", "<title>"), ("metrics", "redisacc_up 1.0")):
                with urllib.request.urlopen(address + path, timeout=TIMEOUT) as page:  # noqa: S310 (our own address)
                    assert expected in page.read().decode()
        finally:
            serving.terminate()


def main() -> None:
    """Runs the checks that the installed extras allow."""
    version, *extras = sys.argv[1:]
    assert redisacc.__version__ == version, redisacc.__version__
    assert Path(redisacc.__file__).is_relative_to(sysconfig.get_path("purelib")), redisacc.__file__
    with Server() as server:
        url = server.url
        checks: dict[str, Callable[[], None]] = {
            "asyncio": lambda: check_asyncio(url),
            "serve": lambda: check_serve(url),
        }
        check_accumulators(url)
        check_training(url)
        check_command(url, version)
        check_checkpoint(url)
        for extra in extras:
            checks.get(extra, lambda: None)()


if __name__ == "__main__":
    main()
