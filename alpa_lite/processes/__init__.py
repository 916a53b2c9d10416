"""One program on many processes: what they agree on before anything runs.

`jax.distributed.initialize` has joined the processes; nothing here launches them, elects one or listens to their
hearts. Process 0 plans and the others take its plan (`agreement`), over the key-value store of JAX's coordination
service (`store`). Which process enters which collective when is a pure function of the plan (`ordering`).
"""
