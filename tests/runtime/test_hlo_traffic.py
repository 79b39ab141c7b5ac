"""Kernels and their bytes, of texts with the arithmetic beside them. XLA's own: tests/cost_model/test_fusion.py."""

from __future__ import annotations

import pytest

from autopar.errors import InternalError
from autopar.runtime.hlo_traffic import kernels_in_hlo


def program(*lines: str, computations: str = "") -> str:
    return "\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            computations,
            "ENTRY %main (p: f32[8,4]) -> f32[8,4] {",
            "  %p = f32[8,4]{1,0} parameter(0)",  # 128 bytes
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


def fused(*lines: str) -> str:
    return "\n".join(["%fused (a: f32[8,4]) -> f32[] {", *(f"  {line}" for line in lines), "}", ""])


def moved(text: str) -> list[tuple[int, float, float]]:
    return [(kernel.times, kernel.read, kernel.written) for kernel in kernels_in_hlo(text)]


def test_views_are_no_kernels() -> None:
    lines = "%b = f32[32]{0} bitcast(%p)", "ROOT %t = (f32[32]{0}, f32[8,4]{1,0}) tuple(%b, %p)"
    assert moved(program(*lines)) == []


def test_a_fusion_reads_each_operand_once() -> None:
    body = fused(
        "%a = f32[8,4]{1,0} parameter(0)",
        "%e = f32[8,4]{1,0} exponential(%a)",
        "ROOT %m = f32[8,4]{1,0} multiply(%a, %e)",
    )
    line = "ROOT %f = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%fused"
    assert moved(program(line, computations=body)) == [(1, 128, 128)]


def test_of_a_slice_inside_only_its_part_is_read() -> None:
    """Row 3, also behind what is elementwise: 4 elements of 4 bytes, and the index."""
    body = fused(
        "%a = f32[8,4]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%z = s32[] constant(0)",
        "%e = f32[8,4]{1,0} exponential(%a)",
        "ROOT %s = f32[1,4]{1,0} dynamic-slice(%e, %i, %z), dynamic_slice_sizes={1,4}",
    )
    lines = "%i = s32[] constant(3)", "ROOT %f = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%fused"
    assert moved(program(*lines, computations=body)) == [(1, 16 + 4, 16)]


def test_two_slices_together_read_no_more_than_there_is() -> None:
    body = fused(
        "%a = f32[8,4]{1,0} parameter(0)",
        "%s = f32[6,4]{1,0} slice(%a), slice={[0:6], [0:4]}",
        "%t = f32[6,4]{1,0} slice(%a), slice={[2:8], [0:4]}",
        "ROOT %m = f32[6,4]{1,0} multiply(%s, %t)",
    )
    line = "ROOT %f = f32[6,4]{1,0} fusion(%p), kind=kLoop, calls=%fused"
    assert moved(program(line, computations=body)) == [(1, 128, 96)]


def test_a_slice_is_written_in_place() -> None:
    """Of 128 bytes 16 are written; what is written is read from another array, converted."""
    body = fused(
        "%a = f32[8,4]{1,0} parameter(0)",
        "%u = bf16[1,4]{1,0} parameter(1)",
        "%c = f32[1,4]{1,0} convert(%u)",
        "%i = s32[] constant(0)",
        "ROOT %d = f32[8,4]{1,0} dynamic-update-slice(%a, %c, %i, %i)",
    )
    lines = "%u = bf16[1,4]{1,0} constant({...})", "ROOT %f = f32[8,4]{1,0} fusion(%p, %u), kind=kLoop, calls=%fused"
    assert moved(program(*lines, computations=body)) == [(1, 8, 16)]


def test_what_is_scattered_is_read_and_written_where_it_falls() -> None:
    """Two rows of 16 bytes into eight, added: they, their places and the rows that they meet are read."""
    lines = (
        "%u = f32[2,4]{1,0} constant({...})",
        "%i = s32[2,1]{1,0} constant({...})",
        "ROOT %s = f32[8,4]{1,0} scatter(%p, %i, %u), update_window_dims={1}, to_apply=%add",
    )
    assert moved(program(*lines)) == [(1, 8 + 32 + 32, 32)]


def test_a_library_has_a_workspace() -> None:
    line = 'ROOT %g = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm"'
    assert moved(program(line)) == [(1, 256, 256)]


def test_a_loop_multiplies() -> None:
    loop = "\n".join(
        [
            "%body (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {",
            "  %s = (s32[], f32[8,4]{1,0}) parameter(0)",
            "  %x = f32[8,4]{1,0} get-tuple-element(%s), index=1",
            "  %n = f32[8,4]{1,0} negate(%x)",
            "  %k = s32[] get-tuple-element(%s), index=0",
            "  ROOT %r = (s32[], f32[8,4]{1,0}) tuple(%k, %n)",
            "}",
            "",
        ]
    )
    lines = (
        "%z = s32[] constant(0)",
        "%t = (s32[], f32[8,4]{1,0}) tuple(%z, %p)",
        "%w = (s32[], f32[8,4]{1,0}) while(%t), condition=%c, body=%body{}",
        "ROOT %o = f32[8,4]{1,0} get-tuple-element(%w), index=1",
    )
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    text = program(*lines, computations=loop)
    assert moved(text.replace("%body{}", f"%body{known}")) == [(7, 128, 128)]
    with pytest.raises(InternalError, match="trip count of w"):
        moved(text.replace("%body{}", "%body"))


def test_of_branches_the_larger_counts() -> None:
    branches = "\n".join(
        [
            "%small (a: f32[8,4]) -> f32[8,4] {",
            "  ROOT %a = f32[8,4]{1,0} parameter(0)",
            "}",
            "%large (b: f32[8,4]) -> f32[8,4] {",
            "  %b = f32[8,4]{1,0} parameter(0)",
            "  ROOT %n = f32[8,4]{1,0} negate(%b)",
            "}",
            "",
        ]
    )
    lines = (
        "%i = pred[] constant(true)",
        "ROOT %c = f32[8,4]{1,0} conditional(%i, %p, %p), true_computation=%small, false_computation=%large",
    )
    assert moved(program(*lines, computations=branches)) == [(1, 128, 128)]


def test_of_an_asynchronous_pair_the_start_counts_and_collectives_do_not() -> None:
    lines = (
        "%c = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%p)",
        "%d = f32[8,4]{1,0} copy-done(%c)",
        "ROOT %r = f32[8,4]{1,0} all-reduce(%d), replica_groups={{0,1}}, to_apply=%add",
    )
    assert moved(program(*lines)) == [(1, 128, 128)]
