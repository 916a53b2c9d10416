"""Every private JAX import, and every place where JAX versions differ, each with its reason.

Supported: JAX 0.10.2 (Python 3.11) to 0.12 (Python 3.12+). Nothing else in the project imports from `jax._src`.
"""

# ruff: noqa: F401, I001
# fmt: off
from alpa_lite._jax.arrays import (
    LazyArray, PlainArray, accept_default_layouts, array_of_blocks, array_with_weak_type, blocks_of, data_of_keys,
    is_deleted, key_kind, keys_of_data,
)
from alpa_lite._jax.equations import (
    ReplacementPredicate, ReplaceCallback, attributes_of, bind, constant_of, emit, expansion, order_callback,
    lowers_for, materialise, replacing_callbacks, retrace, spec_of, replace_by_stand_ins, drop_weak_type,
    equation_scope, describe_location, keep_callback_results, set_weak_type, discharge_references,
)
from alpa_lite._jax.jaxprs import (
    CALLBACKS, CONSTRAINT, constraints_of, derivative, empty_stack, has_ordered_effects,
    inner_jaxprs, is_computed_again, is_jaxpr, is_literal, is_reverse, is_user_file,
    join_name_stacks,
    mark_rematerialised, observable_effects, open_jaxpr, optimization_barrier_primitive, places_result,
    scan_counts, scopes, source_line, spec_dims, unbound_axis, walk_equations,
)
from alpa_lite._jax.kernels import (
    WIDENS_HALVES, PallasGrid, attention_given_to, pallas_grid, pallas_name, pallas_on_blocks, sdy_rule,
)
from alpa_lite._jax.settings import (
    carry_settings, checked_values, context_mesh, coordination_client, job_of, name_settings,
    settings_text, trace_context, trace_under_mesh, skip_value_checks, clear_mesh_context, write_executables,
    is_x64_in_all_threads,
)
