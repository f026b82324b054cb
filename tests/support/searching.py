"""How long a test searches for an example that fails: a little in the suite, long with --long (`make fuzz`)."""

from hypothesis import HealthCheck, given, settings


def searching(config):
    """Returns what calls a function with drawn examples: the given number, and a hundred times as many with --long."""
    long = config.getoption("--long")

    def run(function, *strategies, examples):
        limited = settings(
            max_examples=examples * (100 if long else 1),
            deadline=None,
            database=None,
            derandomize=not long,
            suppress_health_check=list(HealthCheck),
        )
        limited(given(*strategies)(function))()

    return run
