"""Runs one run on several hosts: each starts the same command, and they meet at one address.

| module | what it knows |
| --- | --- |
| `agreement` | what each host says about itself, what is agreed, and what the meeting host makes of both |
| `meeting_point` | where that is: a server on the meeting host, with a lease for each host and one hash |
| `attendance` | this host at the meeting: it shows that it lives, and reads what was agreed |
| `news` | the line for each thing that happens anywhere |
| `nodes` | the nodes of this host: they start, return and are kept |
| `host` | the life of this host in the run, from its coming to its end |

A host says twice a second in its lease what it does: if it no longer does, it is gone. Until all have come, there is
nothing else. Then the hash says which host has which number; only the meeting host changes it, and each change has a
higher version. Every host remembers the hash, and writes it back if the server has none or an older one. So if the
meeting host is gone, the run continues without news; and when it returns, it finds what the others know.

Times are intervals of the meeting point's server or of a monotonic clock, so clocks may differ.
"""
