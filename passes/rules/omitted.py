"""Primitives of JAX that have no rule, and why: what a step meets of them is gathered, with a warning, or refused."""

from __future__ import annotations

_NAMED_AXIS = "it communicates along a named axis, which only the body of a shard_map or a vmap has"
_REFERENCE = "it reads or writes a mutable reference"
_TOKEN = "it orders side effects"
_OPAQUE = "what its kernel computes along which dimension is not known"
_EXPORT = "it belongs to exported programs, whose sizes are known at run time only"
_HIGHER = "it works on types beyond arrays"
_MEMORY = "it is about memory, not about what is in it"
_CALLBACK = "Python is called, which may look at all of its operands"
_HOST = "arrays of one process become one of all, or the other way round, between steps"
_EFFECT = "Python is called for what it does, not for a result"
_SPARSE = "which entries of a sparse array lie where is known at run time only"
_UNUSED = "nothing in JAX makes it: gradients of maxima over windows are select_and_scatter_add"

_GROUPS: dict[str, str] = {
    _NAMED_AXIS: """all_gather all_gather_done all_gather_invariant all_gather_reduced
        all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start axis_index
        pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin ppermute ppermute_done
        ppermute_start precv preduced psend psum psum_done psum_invariant psum_invariant_start psum_start
        pvary ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast
        reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start
        unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p""",
    _REFERENCE: """accum_grad_in_ref addupdate broadcast_to create_linear empty_ref free_ref freeze get new_ref pin
        run_state swap unpin""",
    _TOKEN: "after_all check create_token dce_sink tie unreachable xla_metadata_value",
    _OPAQUE: """cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call scaled_matmul scaled_matmul_wrapper
        tpu_custom_call""",
    _EXPORT: "call_exported dim_as_value dimension_size shape_assertion",
    _HIGHER: """box_get box_set call_hi_primitive call_hi_primitive_linearized from_edtype iota_2x32_shape log_extend
        log_read new_box new_log to_edtype""",
    _MEMORY: "empty with_memory_space_constraint",
    _CALLBACK: "pure_callback",
    _SPARSE: """bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
        bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
        bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense
        csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense""",
    _UNUSED: "select_and_scatter",
    _HOST: "global_array_to_host_local_array host_local_array_to_global_array",
    _EFFECT: "debug_callback debug_print inspect_sharding io_callback",
}

# By primitive, a clause that says why it can't be split.
OMITTED: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
