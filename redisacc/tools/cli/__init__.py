"""The command `redisacc`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import click

from redisacc import __version__
from redisacc._text import MESSAGE, printable

# Name → module, and what `redisacc --help` says, which imports none of them. A command without a text is not listed.
COMMANDS = {
    "acl": ("acl", "Print access rules (ACL) for a user of the server, or load them."),
    "apply": ("rounds", ""),
    "checkpoint": ("checkpoints", "Write the published parameters into a file."),
    "completion": ("completion", ""),
    "demo": ("demo", ""),
    "doctor": ("doctor", "Check a server and suggest changes; remove garbage."),
    "finish": ("changes", "End a run: all its loops end after the same step."),
    "ls": ("show", "List accumulators and parameters."),
    "reduce": ("server", "Add up large gradients next to the server."),
    "restore": ("checkpoints", "Publish the parameters in a checkpoint."),
    "rm": ("changes", "Delete accumulators and parameters."),
    "run": ("run", "Start the processes of a run, and restart them."),
    "serve": ("serve", "Serve a live page, and metrics for Prometheus."),
    "server": ("server", "Run a Redis or Valkey server on this machine."),
    "set": ("changes", "Change what a step waits for, the step, or who is expected."),
    "show": ("show", "Show an accumulator and parameters, or rows."),
    "take": ("rounds", "Take a round and write it to a file; recover one."),
    "watch": ("watch", "Watch rounds fill up, workers that are late or gone, or events."),
}


@contextlib.contextmanager
def _printable_refusals() -> Iterator[None]:
    # click quotes arguments as they are, and scripts pass on what they were given.
    try:
        yield
    except (click.UsageError, click.FileError) as error:
        setattr(error, "message", printable(error.message, MESSAGE))  # noqa: B010 - click declares it final
        raise


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for name, (_, text) in COMMANDS.items() if text]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}"), cmd_name)
        return command

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _printable_refusals():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_refusals():
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # Just before or after the time in which the command handles it. click would end with "Aborted!" and 1.
            from redisacc.tools.cli.shared.failures import exit_code_of_interrupt

            raise SystemExit(exit_code_of_interrupt(error)) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_Commands, name="redisacc", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="redisacc")
def main() -> None:
    """Data-parallel training over Redis: gradients of arrays or whole models, parameters, and runs of processes.

    `redisacc run` starts a training run; `redisacc watch` and `redisacc show` look into it.
    """
