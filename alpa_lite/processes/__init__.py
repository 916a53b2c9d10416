"""One program on many processes: starting and joining them, planning together, and ending together.

- `effects`: changes of the process that uses the library, which it can decline.
- `channel`: all messages between processes, as collectives and boards.
- `initialization`: joining the processes of a job, and detecting one that has not joined.
- `local_launch`: starting processes on this machine.
- `plan_broadcast`: planning in process 0 for all, once it has compared what they trace.
- `divergence`: the log of calls, by which other arguments of another process are noticed.
- `failure_propagation`: the end of processes that would wait for one that failed.
- `ordering`: the order in which processes enter joint tasks, a function of the plan.
"""
