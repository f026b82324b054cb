"""The command `completion`, and the names that a shell is offered."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete

from redisacc.tools.cli import main

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(offline_cli, shell):
    said = offline_cli("completion", shell).stdout
    assert "_REDISACC_COMPLETE" in said
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=said, text=True, check=True, timeout=20)


def complete(*words):
    """What the shell is offered for the last word, which may be incomplete."""
    shell = BashComplete(main, {}, "redisacc", "_REDISACC_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.slow
def test_names_are_completed(real_server, open_dense, client, monkeypatch):
    for name in ("weights-1", "weights-2", "other"):
        open_dense("float32", [1], name)
    client.sadd("redisacc:names", "weights-\x1b[2J")

    def complete_in_a_process(*words):
        environment = {
            **os.environ, "REDISACC_URL": real_server.url, "_REDISACC_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("redisacc", *words)), "COMP_CWORD": str(len(words)),
        }  # fmt: skip
        code = "import redisacc.tools.cli as c; c.main(prog_name='redisacc')"
        found = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, timeout=60
        )
        return [line.partition(",")[2] for line in found.stdout.splitlines()]

    monkeypatch.setenv("REDISACC_URL", real_server.url)
    assert complete_in_a_process("show", "wei") == ["weights-1", "weights-2"]
    assert complete("sh") == ["show"]
    assert complete("de") == []
    assert complete("show", "wei") == ["weights-1", "weights-2"]
    assert complete("watch", "other", "weights-2") == ["weights-2"]
    client.srem("redisacc:names", "weights-\x1b[2J")
    for name in ("weights-1", "weights-2", "other"):
        open_dense("float32", [1], name).delete()
