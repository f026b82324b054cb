"""The loop of synchronous training: a chief and its workers, which survive deaths, restarts and outages."""
