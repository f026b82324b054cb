"""Runs the processes of a training run on one machine: starts, restarts and stops them, and shows their output.

| module | what it knows |
| --- | --- |
| `run` | when the run ends, and which exit code it has |
| `member` | one place of the run, and the processes that take it one after the other |
| `restarts` | how soon a process that died is started again |
| `lines`, `output` | how what the processes write becomes whole lines with a name in front |

It uses no library. honcho starts processes with a name in front of their output, but ends all of them as soon as one
ends, restarts none, joins standard output and standard error, and leaves its processes behind if it is killed. circus
and supervisor restart, but are daemons with sockets and configuration files of their own, and circus brings pyzmq,
tornado and psutil.
"""
