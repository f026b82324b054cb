"""The command `redisacc`. It needs the extra `cli`; without it, `main` prints what to install."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from redisacc import __version__
from redisacc._text import MESSAGE, printable

if TYPE_CHECKING:
    import click

__all__ = ["main"]

# Repeated here from the commands, so that `redisacc --help` imports none of them.
_COMMANDS = {
    "acl": ("redisacc.cli.acl", "Print access rules (ACL) for a user of the server."),
    "apply": ("redisacc.cli.apply", "Apply the gradient in a file."),
    "checkpoint": ("redisacc.cli.checkpoint", "Write the published parameters into a file."),
    "completion": ("redisacc.cli.completion", "Print the completion script for a shell."),
    "dashboard": ("redisacc.cli.dashboard", "Serve a page that shows live what happens."),
    "demo": ("redisacc.cli.demo", "Train word vectors with several processes."),
    "doctor": ("redisacc.cli.doctor", "Check a server and suggest changes."),
    "export": ("redisacc.cli.export", "Serve metrics for Prometheus."),
    "finish": ("redisacc.cli.finish", "End a training: all its loops end after the same step."),
    "forget-worker": ("redisacc.cli.forget_worker", "Forget a worker that will not return."),
    "gc": ("redisacc.cli.gc", "Remove garbage: keys that nothing uses."),
    "load-scripts": ("redisacc.cli.load_scripts", "Load the Lua scripts for users who may not load them."),
    "ls": ("redisacc.cli.ls", "List accumulators and parameters."),
    "recover": ("redisacc.cli.recover", "Recover a round whose taker died."),
    "reduce": ("redisacc.cli.reduce", "Add up large gradients next to the server."),
    "restore": ("redisacc.cli.restore", "Publish the parameters in a checkpoint."),
    "rm": ("redisacc.cli.rm", "Delete accumulators and parameters."),
    "run": ("redisacc.cli.run", "Run the processes of a training, and restart them."),
    "server": ("redisacc.cli.server", "Run a Redis or Valkey server on this machine."),
    "set": ("redisacc.cli.set", "Change how many gradients a step waits for, and how long."),
    "set-step": ("redisacc.cli.set_step", "Set the global step."),
    "show": ("redisacc.cli.show", "Show an accumulator and parameters, or rows."),
    "tail": ("redisacc.cli.tail", "Print the events of an accumulator as they happen."),
    "take": ("redisacc.cli.take", "Take a round and write it to a file."),
    "watch": ("redisacc.cli.watch", "Watch rounds fill up, and see which workers are late or gone."),
}


def _missing_extra(*_args: object, **_kw: object) -> NoReturn:
    sys.stderr.write("redisacc: the commands need click and rich: pip install 'redisacc[cli]'\n")
    raise SystemExit(2)


def _group() -> click.Group:
    import click

    @contextlib.contextmanager
    def printable_refusals() -> Iterator[None]:
        # click quotes arguments as they are, and scripts pass on what they were given.
        try:
            yield
        except (click.UsageError, click.FileError) as error:
            setattr(error, "message", printable(error.message, MESSAGE))  # noqa: B010 - click declares it final
            raise

    class Commands(click.Group):
        def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
            return sorted(_COMMANDS)

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
            if cmd_name not in _COMMANDS:
                return None
            command: click.Command = getattr(
                importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name.replace("-", "_")
            )
            return command

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            # The shell's completion parses unfinished words, which are no mistake.
            if args[0] not in _COMMANDS and not ctx.resilient_parsing:
                similar = difflib.get_close_matches(args[0], _COMMANDS, 1)
                hint = f" Did you mean '{similar[0]}'?" if similar else ""
                raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
            return super().resolve_command(ctx, args)

        def make_context(self, *args: Any, **options: Any) -> click.Context:
            with printable_refusals():
                return super().make_context(*args, **options)

        def invoke(self, ctx: click.Context) -> Any:
            try:
                with printable_refusals():
                    return super().invoke(ctx)
            except KeyboardInterrupt as error:
                # Just before or after the time in which the command handles it. click would end with "Aborted!" and 1.
                from redisacc.cli.shared.failures import exit_code_of_interrupt

                raise SystemExit(exit_code_of_interrupt(error)) from None

        def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    @click.group(cls=Commands, name="redisacc", context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="redisacc")
    def redisacc() -> None:
        """Data-parallel training over Redis: gradients of arrays or whole models, parameters, and runs of processes.

        `redisacc run` starts a training, `redisacc watch` and `redisacc show` look into it.
        """

    return redisacc


main: Callable[..., Any]
main = _missing_extra if find_spec("click") is None or find_spec("rich") is None else _group()
