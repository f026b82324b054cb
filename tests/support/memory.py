"""A limit on the memory of this process."""

import contextlib
import resource


@contextlib.contextmanager
def limited_memory(more):
    """Lets the process allocate so many bytes more. Beyond that, an allocation is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
