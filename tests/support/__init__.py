"""Helpers of the tests: servers, faults, child processes, and the oracles that results are compared with.

| module | what it gives |
| --- | --- |
| `servers` | the servers that tests run on, one of each family for a whole session; what a database holds |
| `daemons` | a server of the test's own, with settings of its own, which it may kill and start again |
| `proxy` | a proxy that breaks connections at a given place of a given message |
| `outages` | outages, each until a process says that it waits |
| `child_processes` | processes that are forked from the tests' own, and may be killed in the middle of what they do |
| `warm_python` | starts programs by a fork of a process that has imported redisacc, which saves half a second each |
| `local_worker` | the program of a worker that makes steps alone and is killed in one of them |
| `terminal` | what a program writes to a terminal of 80 columns |
| `until` | waits for a condition, and says which one if it never comes true |
| `moved_clock` | the clock of redisacc, moved: in this process, in others, in scripts and in expiries |
| `suspension` | minutes in which no process runs |
| `leaks` | the keys that no test may leave behind |
| `exporter` | the command `serve` in a process of its own |
| `memory` | a limit on what the process of the tests may allocate |
| `model` | an independent accumulator, and parameters, in plain numpy |
| `sequences` | random sequences of operations that compare the library with the model |
| `planting` | hostile text, and whether it comes out raw |
| `searching` | how many examples a test draws |
| `selection` | which tests and parameters belong to `make test`, and which to `make test-rest` |
"""
