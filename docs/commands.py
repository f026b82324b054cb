"""Writes docs/reference/commands.md: what each command says of itself. Run it after a change to a command."""

from __future__ import annotations

from pathlib import Path

from redisacc.tools.cli import COMMANDS, main

PAGE = Path(__file__).parent / "reference" / "commands.md"
_HEAD = """# Options of the commands

What `--help` says. The script `docs/commands.py` writes this page. [The command](command-line.md) explains what they
have in common.
"""


def text() -> str:
    """Returns the page."""
    root = main.make_context("redisacc", [], resilient_parsing=True)
    sections = [_HEAD]
    for name in (*main.list_commands(root), *sorted(COMMANDS.keys() - set(main.list_commands(root)))):
        command = main.get_command(root, name)
        assert command is not None
        # As in a call, with the settings of the command. click remembers the names of its option of help.
        context = command.make_context(name, [], root, resilient_parsing=True, terminal_width=80, max_content_width=80)
        sections.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(text())
