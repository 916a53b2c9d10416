"""Sets of JAX's primitives by purpose: every set of names that a pass tests, one meaning each.

A pass that must classify an operation tests `op.name in primitives.PRODUCTS`, not names of its own, so that two passes
that mean the same test the same set. Tables that map a primitive to a function (rules of factors, local forms) are in
the modules of their passes. Names are those of JAX 0.10.2 to 0.12; a name that none of these versions has is an error,
which `tests/passes/ir/test_keys.py` finds.

Three sets could be called "heavy". They differ, because they answer different questions: `COMPUTE_INTENSIVE` (would it
defeat micro-batches to do this on the whole batch?), `EXPENSIVE_TO_REPEAT` (may every stage do it for itself?) and
`UNFUSED` (does it read and write memory of its own?).
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- structure --------------------------------------------------------------------------------------------------------

CONTROL = _names("scan while cond")
"""Operations with bodies."""

PAIRWISE = _names("optimization_barrier device_put reshard pvary")
"""Result k is operand k, whatever the other operands are."""

CONSTRAINT = "user_constraint"
"""The user's constraint on the sharding of a value (`_jax.CONSTRAINT`); `tracing` writes it for JAX's primitives."""

PLACEMENT = _names("device_put pvary reshard sharding_constraint user_constraint")
"""Operations that only say where a value lies."""

CHECKPOINT = _names("remat2")
"""Calls whose body is computed again for the backward pass."""

MANUAL = _names("shard_map mpmd_map core_map")
"""Operations that run a body on devices that they choose themselves."""

COLLECTIVES = _names("""
    all_gather all_to_all pmax pmin ppermute psum psum_invariant ragged_all_to_all reduce_scatter
""")
"""Operations that communicate along named axes."""

# --- what is computed -------------------------------------------------------------------------------------------------

PRODUCTS = _names("dot_general conv_general_dilated")
"""Sums of products over an index that the result does not have: two FLOPs for each combination of factors."""

ADDS = _names("add add_any")
ADDITIONS = ADDS | {"sub"}
"""Linear in both operands together."""

DRAWS = _names("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
"""Operations that draw random numbers."""

SHARED_STATE_DRAWS = _names("rng_uniform")
"""Draws from a hidden state that each device has for itself."""

COMPARISONS = _names("lt le gt ge eq ne max min clamp")
"""Operations that compare values with each other."""

EXTREMA = _names("""
    cummax cummin reduce_max reduce_min reduce_window_max reduce_window_min scatter-max scatter-min
""")
"""Operations whose results are elements of an operand, in another loop over it than elementwise operations."""

SCATTERS = _names("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
SCATTER_ADDITIONS = _names("scatter-add scatter-sub")

CUMULATIVE = _names("cumsum cumprod cummax cummin cumlogsumexp")

MATRIX_ALGEBRA = _names("""
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
    symmetric_product triangular_solve tridiagonal
""")
"""Linear algebra on the last two dims; all other dims are a batch."""

VECTOR_ALGEBRA = _names("lu_pivots_to_permutation tridiagonal_solve")
"""Linear algebra on the last dim of the first operand."""

ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow random_clone random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh threefry2x32 user_constraint xor zeta
""")
"""Element i of each result depends on element i of each operand, or on its only element."""

# --- what is moved ----------------------------------------------------------------------------------------------------

RESHAPES = _names("broadcast_in_dim convert_element_type copy reshape squeeze")
"""One operand, whose elements the result has in another shape or dtype."""

SELECTIONS = _names("slice dynamic_slice gather squeeze split")
"""The results are parts of the first operand."""

REARRANGED = _names("""
    broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice pad reshape rev slice split
    squeeze stack transpose unstack
""")
"""Every element of a result is an element of an operand, at another place."""

SIZED = _names("slice gather dynamic_slice dynamic_update_slice split iota random_bits pad")
"""Parameters hold sizes of dims, beside `broadcast_in_dim` and `reshape`."""

# --- linearity --------------------------------------------------------------------------------------------------------

LINEAR_CHAIN = _names("neg transpose reshape squeeze copy convert_element_type")
"""Linear in their one operand, element by element."""

LINEAR_IN_FIRST = _names("""
    neg transpose reshape squeeze copy broadcast_in_dim reduce_sum slice rev cumsum split reduce_window_sum real imag
    conj dynamic_slice gather unstack sharding_constraint reshard user_constraint
""")
"""Linear in the first operand; the others are indices."""

LINEAR_IN_EACH = PRODUCTS | _names("mul ragged_dot_general")
"""Linear in each operand while the others are fixed."""

JOINING = _names("concatenate stack")
"""For no layout does it matter in which order their operands come."""

LINEAR_IN_ALL = ADDITIONS | JOINING | _names("complex pad")
"""Linear in all operands together."""

# --- what it costs ----------------------------------------------------------------------------------------------------

CUDNN = _names("dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper")
"""JAX's operations for cuDNN's attention."""

KERNELS = CUDNN | _names("kernel custom_partitioning ffi_call pallas_call")
"""Functions that are one operation. `kernel` is that of `alpa_lite.ir.kernels`; all others are JAX's."""

COMPUTE_INTENSIVE = KERNELS | LINEAR_IN_EACH - {"mul"} | MATRIX_ALGEBRA | VECTOR_ALGEBRA | _names("""
    fft custom_linear_solve scan while shard_map
""")  # fmt: skip
"""Much more work than reading the operands, or of unknown work."""

EXPENSIVE_TO_REPEAT = PRODUCTS | KERNELS | _names("sort fft")
"""Better done once and sent than done by every stage that needs the result."""

CHEAP_TO_REPEAT = RESHAPES | _names("""
    add and bitcast_convert_type dynamic_slice eq ge gt iota le lt mul ne neg not optimization_barrier or random_bits
    random_fold_in random_unwrap random_wrap select_n shift_left shift_right_logical slice sub threefry2x32 transpose
    xor
""")
"""Costs less to do again than it costs in memory to keep the result."""

KEPT = DRAWS | CONTROL | _names("conv_general_dilated sort top_k fft")
"""Primitives whose results selective rematerialisation keeps, in addition to products without batch dims."""

UNFUSED = (
    PRODUCTS
    | KERNELS
    | _names("""
    argmax argmin cummax cummin cumprod cumsum cumlogsumexp fft gather reduce_max reduce_min reduce_prod reduce_sum
    scatter scatter-add sort top_k
""")
)
"""Operations that compilers do not fuse with elementwise ones: they read and write memory themselves."""

SAME_BYTES = PLACEMENT | _names("name reshape squeeze stop_gradient bitcast_convert_type copy")
"""The result is the operand under another shape, dtype or name."""

IN_LOOPS = (ELEMENTWISE | REARRANGED | SELECTIONS | _names("iota tile")) - SAME_BYTES - {"dynamic_update_slice"}
"""Operations that compilers compute within any kernel that needs them, element by element."""

TRANSCENDENTAL = DRAWS | _names("""
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1
    igamma igamma_grad_a igammac lgamma log log1p logistic polygamma pow sin sinh tan tanh zeta
""")
"""Elementwise operations that take many instructions an element."""

FOLDS = CUMULATIVE | _names("""
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor reduce_window
    reduce_window_max reduce_window_min reduce_window_sum
""")
"""Reductions: compilers take what is reduced into their kernel."""

DECIDING = PRODUCTS | KERNELS | _names("gather scatter sort dynamic_update_slice")
"""Operations whose sharding is a decision of its own, however little they compute."""
