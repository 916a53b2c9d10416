"""The integer program of sharding, in arrays: NumPy and SciPy, and nothing of JAX or of the compiler.

In: `alpa_lite.ir.strategy.StrategyGraph`. Out: `alpa_lite.ir.strategy.Solution` with status, bound and gap.
"""
