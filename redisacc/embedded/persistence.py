"""How a server keeps its data, and what a crash of it can lose."""

from __future__ import annotations

import enum

__all__ = ["Persistence"]


class Persistence(enum.Enum):
    """How a server keeps its data. The value says, as the end of a sentence, what a crash can lose."""

    NONE = "keeps nothing on disk: its data end with it"
    SNAPSHOTS = (
        "saves a snapshot a minute after a change, and when it is stopped: a crash of the server loses what changed "
        "since the last snapshot"
    )
    APPEND_ONLY_FILE = (
        "appends every change to a file: a crash of the server or of the machine loses at most about two seconds"
    )
