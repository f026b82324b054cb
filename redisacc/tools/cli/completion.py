"""The command `redisacc completion`: prints the completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from redisacc.tools.cli.shared.options import HELP


@click.command(context_settings=HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and names of accumulators.

    \b
    bash   eval "$(redisacc completion bash)"          in ~/.bashrc
    zsh    eval "$(redisacc completion zsh)"           in ~/.zshrc
    fish   redisacc completion fish | source           in config.fish

    Names are read from the server that --redis or REDISACC_URL gives.
    """
    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root()
    # source() would run the shell to learn its version.
    script = found(root.command, {}, "redisacc", "_REDISACC_COMPLETE")
    click.echo(script.source_template % script.source_vars())
