"""Helpers of the tests: servers, faults, child processes, and the oracles that results are compared with.

| module | what it gives |
| --- | --- |
| `servers` | the servers that tests run on, one of each family for a whole session; what a database holds |
| `daemons` | a server of the test's own, with settings of its own, which it may kill and start again |
| `proxy` | a proxy that breaks connections at a given place of a given message |
| `child_processes`, `fork_server` | processes that do one operation each and may be killed in the middle of it |
| `warm_python` | starts programs by a fork of a process that has imported redisacc, which saves half a second each |
| `forking_parent` | a program that forks while its threads use clients, or hold every lock |
| `local_worker` | the program of a worker that makes steps alone and is killed in one of them |
| `crew_member` | the program of one of many processes that work on one accumulator |
| `terminal` | what a program writes to a terminal of 80 columns |
| `until` | waits for a condition, and says which one if it never comes true |
| `timeouts` | shorter timeouts, for tests in which a server is silent |
| `moved_clock` | the clock of redisacc, moved: in this process, in others, in scripts and in expiries |
| `suspension` | a process that seems not to run for minutes, at a given exchange of a call |
| `leaks` | the keys that no test may leave behind |
| `memory` | a limit on what the process of the tests may allocate |
| `model` | an independent accumulator, and parameters, in plain numpy |
| `sequences` | random sequences of operations that compare the library with the model |
| `planting` | hostile text for every field of every key, and whether it comes out raw |
| `strategies` | hypothesis strategies for bytes that look nearly like ours |
| `selection` | which tests and parameters belong to `make test`, and which to `make test-rest` |
"""
