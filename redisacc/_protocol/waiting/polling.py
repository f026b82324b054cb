"""How a wait polls the server: messages are only hints, so everything that waits also asks from time to time."""

from __future__ import annotations

# A wait polls at least this often, in seconds.
POLL_INTERVAL = 1.0
# How long a poll tries to reach the server before an outage is logged, in seconds.
POLL_TIMEOUT = 5.0
# The last poll gets at least this long for its round trip, even if the deadline has passed, in seconds.
LAST_POLL_TIMEOUT = 0.5
