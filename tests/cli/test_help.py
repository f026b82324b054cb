"""The command itself: its help, and that it imports no more than it needs."""

import re

import click

from redisacc.tools.cli import COMMANDS, main


def test_every_command_is_a_module_with_help(offline_cli):
    listed = offline_cli("--help").stdout
    names = main.list_commands(click.Context(main))
    assert re.findall(r"^  ([a-z][a-z-]*)  +[A-Z].*\.$", listed, re.MULTILINE) == names
    assert set(COMMANDS) - set(names) == {"apply", "completion", "demo"}
    for name in COMMANDS:
        said = offline_cli(name, "--help")
        assert said.exit_code == 0
        assert max(map(len, said.stdout.splitlines())) <= 80
        if name not in ("completion", "demo", "server"):
            assert "--redis URL" in said.stdout
        if name not in ("completion", "demo", "run", "server"):
            # What runs until it is stopped ends well when it is stopped.
            ends_well = "ended by Ctrl-C or SIGTERM" if name == "reduce" else "success"
            assert f"Exit codes: 0 {ends_well}" in said.stdout
