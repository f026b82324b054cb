"""The command `redisacc checkpoint`: writes what is published into a file."""

from __future__ import annotations

from pathlib import Path

import click

from redisacc._checkpoints.file import library, write_file
from redisacc._monitoring.facts import bytes_text
from redisacc._text import printable
from redisacc._training.checkpointer import read_published
from redisacc.cli.shared.failures import EXIT_CODES, NOT_FOUND, USAGE, fail, report_failures
from redisacc.cli.shared.options import NonEmptyPath, json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped

__all__ = ["checkpoint"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("file", type=NonEmptyPath())
@redis_option
@json_option
@report_failures
def checkpoint(*, name: str, file: Path, url: str | None, as_json: bool) -> None:
    """Write the published parameters, the chief's state and the step into FILE.

    The training may run meanwhile. FILE has the format of safetensors; it is replaced if it exists, and after a crash
    it is either the old one or the new one. `redisacc restore` publishes it again.

    \b
      redisacc checkpoint mnist mnist-final.safetensors
    """
    try:
        library()
    except ImportError as error:
        fail(str(error), USAGE)
    transport, keys = transport_of(url), keys_of(name)
    found = read_published(transport, keys.name)
    if found is None:
        fail(f"nothing has been published under the name {printable(keys.name)}", NOT_FOUND)
    nbytes, sha256 = write_file(file, found)
    if as_json:
        echo_json({"file": str(file), "step": found.step, "bytes": nbytes, "sha256": sha256})
    else:
        echo_wrapped(
            f"wrote step {found.step} of {printable(keys.name)} to {printable(str(file))}: {bytes_text(nbytes)}"
        )
