"""One program on many processes: what they agree on and tell each other.

`jax.distributed.initialize` has joined the processes; nothing here launches them, elects one or listens to their
hearts. Process 0 plans and the others take its plan (`agreement`), over the key-value store of JAX's coordination
service (`store`), over which they also save and check together (`operations`). Which process enters which collective
when is a pure function of the plan (`ordering`). One that raises alone ends the others (`alarm`), and one that plans
alone does not wait for them (`turns`).
"""
