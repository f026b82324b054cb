"""Runs one training on several hosts: each starts the same command, and they meet at one address.

| module | what it knows |
| --- | --- |
| `documents` | what hosts tell each other: each one about itself, and the meeting host about the training |
| `agreement` | what the meeting host makes of what the hosts say: a pure function |
| `events` | the line for each thing that happens anywhere |
| `meeting_point` | where the documents are: a server on the meeting host |
| `nodes` | the nodes of this host: they start, return and are kept |
| `attendance` | this host at the meeting: it shows that it lives, and reads what was agreed |
| `host` | the life of this host in the training, from its coming to its end |

There are two kinds of documents, and each key has one writer. A host writes one about itself, with an expiry, twice a
second: if it no longer does, the host is gone. The meeting host writes the agreement, which says who has which place.
Times are intervals of the meeting point's server or of a monotonic clock, so clocks may differ. If the meeting host is
gone, the training continues without news; when it returns, its meeting point is empty, and the others bring the
agreement back.
"""
