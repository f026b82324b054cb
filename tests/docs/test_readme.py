"""The README's quick start, run as typed: its blocks as files, its chief and worker as processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from redisacc.embedded import Server

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    if not README.is_file():
        pytest.skip("the README isn't part of an installation")
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def environment() -> object:
    with Server() as server:
        yield {**os.environ, "REDISACC_URL": server.url}


def run(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def test_quick_start(blocks: list[str], environment: dict[str, str]) -> None:
    chief_code, worker_code = (next(b for b in blocks if b.startswith(f"# {who}.py")) for who in ("chief", "worker"))
    assert all(len(code.splitlines()) <= 12 for code in (chief_code, worker_code)), "about ten lines each"
    with run(worker_code, environment) as worker:
        try:
            for first in (0, 5):
                with run(chief_code, environment) as chief:
                    lines = chief.communicate(timeout=60)[0].splitlines()
                assert chief.returncode == 0
                assert [line.split(":")[0] for line in lines] == [f"step {first + k}" for k in range(5)]
                numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", lines[-1].split("weights")[1])]
                assert numbers == pytest.approx([-0.5, -1, -1.5], abs=0.3)
        finally:
            worker.send_signal(signal.SIGINT)
            printed = worker.communicate(timeout=60)[0].splitlines()
    assert len(printed) >= 40
    assert "applied" in printed[0]
    with redis.Redis.from_url(environment["REDISACC_URL"]) as client:
        assert client.hget("redisacc:{quickstart}", "global_step") == b"10"


def test_sparse_gradients_print_what_the_comment_says(blocks: list[str], environment: dict[str, str]) -> None:
    code = next(block for block in blocks if "Sparse" in block)
    with run(code, environment) as process:
        printed = process.communicate(timeout=60)[0].strip()
    assert printed == re.search(r"print\(.*\)  # (.*)", code)[1]  # type: ignore[index]


def test_every_python_block_is_run_by_one_of_these(blocks: list[str]) -> None:
    assert len(blocks) == 3
