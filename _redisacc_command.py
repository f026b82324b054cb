"""The entry point of the command `redisacc`.

It is outside the package, because importing the package takes longer than the rest of the start. Python's handler for
Ctrl-C raises KeyboardInterrupt, which ends an import with a traceback, or is lost in a destructor. Until a command is
ready for that (`redisacc.tools.cli.shared.failures.interrupts_raise`), Ctrl-C ends the process as it ends any other
program.
"""

import signal

# A shell's background job ignores Ctrl-C, and stays so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Runs the command."""
    from redisacc.tools.cli import main as run

    run(prog_name="redisacc")
