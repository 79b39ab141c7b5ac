"""The order of kernels and collectives in a compiled program."""

from __future__ import annotations

from autopar.ir.sharding import Collective
from autopar.passes.submeshes import mesh_at
from autopar.runtime.hlo_schedule import schedule_in_hlo

_TEXT = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (p.0: bf16[64,32], p.1: bf16[32,16]) -> bf16[64,16] {
  %p.0 = bf16[64,32]{1,0} parameter(0)
  %p.1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = bf16[64,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%exchange (q: f32[8,4]) -> f32[8,4] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %all-to-all = f32[8,4]{1,0} all-to-all(%q), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: bf16[64,32], w: bf16[32,16], g: f32[100], h: f32[8,4]) -> (bf16[64,16], f32[100], f32[8,4]) {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %g = f32[100]{0} parameter(2)
  %h = f32[8,4]{1,0} parameter(3)
  %all-reduce-start = f32[100]{0} all-reduce-start(%g), replica_groups={{0,1}}, to_apply=%add
  %fusion = bf16[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %all-reduce-done = f32[100]{0} all-reduce-done(%all-reduce-start)
  %all-to-all-start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) async-start(%h), calls=%exchange
  %copy-start = (f32[100]{0}, f32[100]{0}, u32[]) copy-start(%all-reduce-done)
  %copy-done = f32[100]{0} copy-done(%copy-start)
  %all-to-all-done = f32[8,4]{1,0} async-done(%all-to-all-start)
  ROOT %tuple = (bf16[64,16]{1,0}, f32[100]{0}, f32[8,4]{1,0}) tuple(%fusion, %copy-done, %all-to-all-done)
}
"""


def test_starts_and_ends_with_kernels_between_them() -> None:
    total, exchange = Collective("all_reduce", ("x",), 400), Collective("all_to_all", ("x",), 128)
    issued = schedule_in_hlo(_TEXT, mesh_at(0, (2,)))
    assert [(len(each.kernels), each.collectives, each.starts, each.ends) for each in issued] == [
        (0, (total,), True, False), (1, (), True, True), (0, (total,), False, True),
        (0, (exchange,), True, False), (1, (), True, True), (0, (exchange,), False, True),
    ]  # fmt: skip
    [product] = issued[1].kernels
    assert (product.flops, product.dtype) == (2 * 64 * 32 * 16, "bf16")
    assert product.nbytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    [copy] = issued[4].kernels
    assert (copy.flops, copy.nbytes) == (0, 800)


_LOOP = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%going (c: (s32[], f32[100])) -> pred[] {
  %c = (s32[], f32[100]{0}) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%k, %three), direction=LT
}

%round (r: (s32[], f32[100])) -> (s32[], f32[100]) {
  %r = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%r), index=0
  %x = f32[100]{0} get-tuple-element(%r), index=1
  %all-reduce-start = f32[100]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %copy = f32[100]{0} copy(%x)
  %all-reduce-done = f32[100]{0} all-reduce-done(%all-reduce-start)
  ROOT %tuple = (s32[], f32[100]{0}) tuple(%i, %all-reduce-done)
}

ENTRY %main (x: (s32[], f32[100])) -> (s32[], f32[100]) {
  %p = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%p), condition=%going, body=%round, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_what_a_round_of_a_loop_issues() -> None:
    total = Collective("all_reduce", ("x",), 400)
    [loop] = schedule_in_hlo(_LOOP, mesh_at(0, (2,)))
    assert (loop.rounds, loop.collectives, sum(kernel.times for kernel in loop.kernels)) == (3, (total,) * 3, 3)
    assert [(len(each.kernels), each.collectives, each.starts, each.ends) for each in loop.round] == [
        (0, (total,), True, False), (1, (), True, True), (0, (total,), False, True),
    ]  # fmt: skip
