"""Runs commands of `redisacc` in this process, as a person does."""

import json

from click.testing import CliRunner

from redisacc.tools.cli import main


def run_json(*words, url):
    """Runs a command with --json, and returns what it prints, whatever its exit code is."""
    done = CliRunner().invoke(main, [*words, "--json", "--redis", url])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


def collect_garbage(url, *options):
    """Removes the garbage on a server, and returns what is said of each piece; with ``--dry-run``, only that."""
    return run_json("doctor", "--fix", "--yes", *options, url=url)["leftovers"]


def diagnose(url):
    """Returns what `doctor` finds: the status, the text and the advice of each check."""
    return {finding["what"]: finding for finding in run_json("doctor", url=url)}
