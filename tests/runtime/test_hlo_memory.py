"""Programs in XLA's text whose peaks can be counted by hand: f32[256] has 1024 bytes."""

from autopar.runtime.hlo_memory import Held, held_at_peak

K = 1024


def program(*lines: str, computations: str = "") -> str:
    return "\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            computations,
            "ENTRY %main (p: f32[256]) -> f32[256] {",
            "  %p = f32[256]{0} parameter(0)",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


def held(*lines: str, computations: str = "") -> list[tuple[int, str]]:
    return [(each.nbytes, each.scope) for each in held_at_peak(program(*lines, computations=computations))]


def op(name: str, opcode: str, operands: str, type_: str = "f32[256]{0}", attributes: str = "") -> str:
    return f'%{name} = {type_} {opcode}({operands}){attributes}, metadata={{op_name="{name}"}}'


def test_a_value_lives_until_its_last_reader() -> None:
    lines = (
        op("a", "negate", "%p"), op("b", "negate", "%a"), op("c", "add", "%a, %b"), op("d", "negate", "%c"),
        f"ROOT {op('e', 'negate', '%d')}",
    )  # fmt: skip
    # a, b and c; then c and d; the result is not a temporary.
    assert sorted(held(*lines)) == [(K, "a"), (K, "b"), (K, "c")]


def test_views_and_results_in_place_hold_nothing_of_their_own() -> None:
    lines = (
        op("a", "negate", "%p"),
        op("b", "bitcast", "%a", "f32[16,16]{1,0}"),
        op("c", "all-reduce", "%b", "f32[16,16]{1,0}"),
        op("t", "tuple", "%c, %p", "(f32[16,16]{1,0}, f32[256]{0})"),
        op("g", "get-tuple-element", "%t", "f32[16,16]{1,0}", ", index=0"),
        f"ROOT {op('e', 'negate', '%g')}",
    )
    assert held(*lines) == [(K, "a")]


def test_arguments_and_results_are_not_among_it() -> None:
    assert held(f"ROOT {op('e', 'negate', '%p')}") == []


def test_what_has_started_does_not_hold_its_operands_twice() -> None:
    start = op("s", "all-gather-start", "%p", "(f32[256]{0}, f32[1024]{0})")
    lines = (start, op("done", "all-gather-done", "%s", "f32[1024]{0}"), f"ROOT {op('e', 'reduce', '%done')}")
    assert held(*lines) == [(4 * K, "s")]


LOOP = """%body (arg: (f32[256])) -> (f32[256]) {
  %arg = (f32[256]{0}) parameter(0)
  %x = f32[256]{0} get-tuple-element(%arg), index=0
  %y = f32[512]{0} concatenate(%x, %x), metadata={op_name="inside"}
  %z = f32[256]{0} reduce(%y)
  ROOT %r = (f32[256]{0}) tuple(%z)
}

%condition (arg: (f32[256])) -> pred[] {
  %arg = (f32[256]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}
"""


def test_a_loop_holds_its_bodys_peak_on_top() -> None:
    lines = (
        op("a", "negate", "%p"),
        op("t", "tuple", "%p", "(f32[256]{0})"),
        op("w", "while", "%t", "(f32[256]{0})", ", condition=%condition, body=%body"),
        op("g", "get-tuple-element", "%w", attributes=", index=0"),
        f"ROOT {op('e', 'add', '%a, %g')}",
    )
    assert held(*lines, computations=LOOP) == [(2 * K, "inside"), (K, "a")]


UPDATE = """%update (whole: f32[256], piece: f32[16], at: s32[]) -> f32[256] {
  %whole = f32[256]{0} parameter(0)
  %piece = f32[16]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %u = f32[256]{0} dynamic-update-slice(%whole, %piece, %at)
}
"""


def test_a_fusion_that_ends_in_an_update_writes_in_place() -> None:
    lines = (
        op("a", "negate", "%p"),
        op("piece", "slice", "%p", "f32[16]{0}"),
        op("f", "fusion", "%a, %piece, %piece", attributes=", kind=kLoop, calls=%update"),
        f"ROOT {op('e', 'negate', '%f')}",
    )
    assert held(*lines, computations=UPDATE) == [(K, "a"), (64, "piece")]


def test_the_largest_come_first_with_their_opcode() -> None:
    text = program(
        op("a", "negate", "%p"), op("b", "concatenate", "%a, %a", "f32[512]{0}"), f"ROOT {op('e', 'add', '%a, %b')}"
    )
    assert held_at_peak(text) == (Held(2 * K, "concatenate", "b"), Held(K, "negate", "a"))


def test_each_result_of_a_kernel_lives_for_itself() -> None:
    lines = (
        op("f", "fusion", "%p", "(f32[512]{0}, f32[256]{0})", ", kind=kInput, calls=%several"),
        op("large", "get-tuple-element", "%f", "f32[512]{0}", ", index=0"),
        op("small", "get-tuple-element", "%f", attributes=", index=1"),
        op("a", "reduce", "%large", "f32[768]{0}"),
        op("b", "slice", "%a", "f32[1024]{0}"),
        f"ROOT {op('e', 'add', '%b, %small')}",
    )
    # While b is made, a and the small result are there, the large one is not.
    assert held(*lines, computations=SEVERAL) == [(4 * K, "b"), (3 * K, "a"), (K, "f")]


def test_picking_a_result_late_does_not_keep_the_others() -> None:
    lines = (
        op("f", "fusion", "%p", "(f32[512]{0}, f32[256]{0})", ", kind=kInput, calls=%several"),
        op("large", "get-tuple-element", "%f", "f32[512]{0}", ", index=0"),
        op("a", "reduce", "%large", "f32[768]{0}"),
        op("b", "slice", "%a", "f32[1024]{0}"),
        op("small", "get-tuple-element", "%f", attributes=", index=1"),
        f"ROOT {op('e', 'add', '%b, %small')}",
    )
    assert held(*lines, computations=SEVERAL) == [(4 * K, "b"), (3 * K, "a"), (K, "f")]


SEVERAL = """%several (p: f32[256]) -> (f32[512], f32[256]) {
  %p = f32[256]{0} parameter(0)
  %q = f32[512]{0} concatenate(%p, %p)
  ROOT %r = (f32[512]{0}, f32[256]{0}) tuple(%q, %p)
}
"""
