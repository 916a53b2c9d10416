"""Costs of operations on one device, before any layout is chosen: floating-point operations and memory traffic.

In: operations of a graph. Out: FLOPs (`flops`, `attention`), and the bytes that a compiled program reads and writes
once the compiler has put several operations into one kernel (`items`, `fusion`, `traffic`).
"""
