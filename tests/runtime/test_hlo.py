"""Texts with their collectives beside them. What the CPU's compiler writes is in tests/passes/test_collectives.py."""

from collections import Counter
from pathlib import Path

import pytest

from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective, StepKind
from autopar.runtime.hlo import collectives_in_hlo

WIDE = Mesh(tuple(range(8)), (2, 4), ("x", "y"))
CUBE = Mesh(tuple(range(8)), (2, 2, 2), ("x", "y", "z"))


def program(*lines: str, computations: str = "") -> str:
    return "\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            computations,
            "ENTRY %main (p: f32[8,4]) -> f32[8,4] {",
            "  %p = f32[8,4]{1,0} parameter(0)",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("groups", "mesh", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", WIDE, ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", WIDE, ("x",)),
        ("{{0,4,1,5,2,6,3,7}}", WIDE, ("x", "y")),
        ("{}", WIDE, ("x", "y")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", WIDE, ()),
        ("[2,4]<=[8]", WIDE, ("y",)),
        ("[1,8]<=[8]", WIDE, ("x", "y")),
        ("[4,2]<=[2,4]T(1,0)", WIDE, ("x",)),  # numbers 0 4 1 5 2 6 3 7, two by two
        ("[8,1]<=[8]", WIDE, ()),
        ("[4,2]<=[8]", CUBE, ("z",)),
        ("[4,2]<=[4,2]T(1,0)", CUBE, ("y",)),  # 0 2 4 6 1 3 5 7: 0 and 2, 4 and 6, …
        ("[2,4]<=[2,2,2]T(1,0,2)", CUBE, ("x", "z")),  # 0 1 4 5 2 3 6 7, four by four
        ("mesh['x'=2,'y'=4] {'x'}", WIDE, ("x",)),
        ("mesh['x'=2,'y'=4] {'y','x'}", WIDE, ("x", "y")),
        ("mesh['x'=2,'y'=4] {}", WIDE, ()),
        ("mesh[x=2,y=4] {y}", WIDE, ("y",)),
        ("mesh['a'=1,'b'=8] {'a'}", WIDE, ()),
        ("mesh['a'=1,'b'=8] {'b'}", WIDE, ("x", "y")),
        ("mesh['b'=8] {'b':(1)2}", WIDE, ("x",)),  # 8 as 2 and 4, of which the first: 0 4, 1 5, …
        ("mesh['b'=8] {'b':(2)4}", WIDE, ("y",)),
        ("mesh['b'=8] {'b':(2)2}", CUBE, ("y",)),
        ("mesh['b'=8] {'b':(4)2,'b':(1)2}", CUBE, ("x", "z")),
        # The names stand for devices in the order 0 4 1 5 2 6 3 7.
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", WIDE, ("x",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", WIDE, ("y",)),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2,3,4,5,7,6) {'a'}", WIDE, None),
        ("mesh['b'=8] {'b':(4)2}", WIDE, None),  # half of y
        ("{{0,6},{1,7},{2,4},{3,5}}", WIDE, None),  # no axis
        ("{{0,1},{2,3},{4,5},{6,7}}", WIDE, None),  # half of y
        ("{{0,1,2,3}}", WIDE, None),  # the others are left out
    ],
)
def test_groups_are_mesh_axes(groups: str, mesh: Mesh, axes: tuple[str, ...] | None) -> None:
    attributes = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    add = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %s = f32[] add(%a, %b)\n}\n"
    text = program(f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), {attributes}", computations=add)
    if axes is None:
        with pytest.raises(InternalError, match="are no axes of mesh"):
            collectives_in_hlo(text, mesh)
    else:
        assert collectives_in_hlo(text, mesh) == ((Collective("all_reduce", axes, 128),) if axes else ())


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("y",)),
        ("{{0,4}}", ("x",)),
        ("{{0,0},{1,2},{2,1}}", ("y",)),
        ("{{0,5},{5,0}}", ("x", "y")),
        ("{{0,0},{1,1}}", ()),
    ],
)
def test_pairs_are_the_axes_along_which_something_moves(pairs: str, axes: tuple[str, ...]) -> None:
    line = f"ROOT %r = f32[8,4]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
    expected = (Collective("permute", axes, 128),) if axes else ()
    assert collectives_in_hlo(program(line), WIDE) == expected


@pytest.mark.parametrize(
    ("line", "kind", "payloads"),
    [
        # A float32[8,4] has 128 bytes; the groups have four members.
        ("%r = f32[32,4]{1,0} all-gather(%p), dimensions={0}", "all_gather", [512]),
        ("%r = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%p), dimensions={0}", "all_gather", [512]),
        ("%r = f32[2,4]{1,0} reduce-scatter(%p), dimensions={0}", "reduce_scatter", [128]),
        ("%r = f32[8,4]{1,0} all-to-all(%p), dimensions={0}", "all_to_all", [128]),
        ("%r = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce(%p, %p)", "all_reduce", [128, 128]),
        ("%r = (f32[8,4], /*index=1*/f32[8,4], f32[8,4], f32[8,4]) all-to-all(%p, %p, %p, %p)", "all_to_all", [512]),
        ("%r = f32[8,4]{1,0:T(8,128)} all-reduce(f32[8,4]{1,0:T(8,128)} %p)", "all_reduce", [128]),
    ],
)
def test_payloads(line: str, kind: StepKind, payloads: list[int]) -> None:
    found = collectives_in_hlo(program(f"ROOT {line}, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}"), WIDE)
    assert found == tuple(Collective(kind, ("y",), payload) for payload in payloads)


@pytest.mark.parametrize(
    ("element", "size"), [("pred", 1), ("s8", 1), ("u16", 2), ("bf16", 2), ("f8e4m3fn", 1), ("s64", 8), ("c64", 8)]
)
def test_element_sizes(element: str, size: int) -> None:
    lines = (
        f"%q = {element}[3,5]{{1,0}} parameter(1)",
        f"ROOT %r = {element}[3,5]{{1,0}} all-to-all(%q), replica_groups={{}}, dimensions={{0}}",
    )
    assert collectives_in_hlo(program(*lines), WIDE) == (Collective("all_to_all", ("x", "y"), 15 * size),)


CALLEES = """
%inner (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %g = f32[8,4]{1,0} all-to-all(%a), replica_groups=[2,4]<=[8], dimensions={0}
}

%silent (b: f32[8,4]) -> f32[8,4] {
  ROOT %b = f32[8,4]{1,0} parameter(0)
}
"""
INNER = Collective("all_to_all", ("y",), 128)


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        (["ROOT %r = f32[8,4] call(%p), to_apply=%inner"], 1),
        (["%c = f32[8,4] call(%p), to_apply=%inner", "ROOT %r = f32[8,4] fusion(%c), kind=kLoop, calls=%inner"], 2),
        (
            [
                "%s = ((f32[8,4]), f32[8,4], u32[]) async-start(%p), calls=%inner",
                "%u = ((f32[8,4]), f32[8,4], u32[]) async-update(%s)",
                "ROOT %d = f32[8,4] async-done(%u)",
            ],
            1,
        ),
        (
            [
                "ROOT %w = f32[8,4] while(%p), condition=%silent, body=%inner, "
                'backend_config={"known_trip_count":{"n":"7"},"x":1}'
            ],
            7,
        ),
        (["ROOT %w = f32[8,4] while(%p), condition=%silent, body=%silent"], 0),
        (["ROOT %b = f32[8,4] conditional(%p, %p), branch_computations={%inner, %inner}"], 1),
        (["ROOT %b = f32[8,4] conditional(%p, %p), true_computation=%silent, false_computation=%silent"], 0),
    ],
)
def test_callees_are_counted_where_they_are_called(lines: list[str], times: int) -> None:
    assert collectives_in_hlo(program(*lines, computations=CALLEES), WIDE) == (INNER,) * times


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ROOT %w = f32[8,4] while(%p), condition=%silent, body=%inner", "trip count is not known"),
        ("ROOT %b = f32[8,4] conditional(%p), branch_computations={%inner, %silent}", "branches of b"),
        ("ROOT %s = (f32[8,4], u32[], token[]) send(%p), channel_id=1", "cannot count send"),
        ("ROOT %r = f32[8,4] all-reduce(%p), to_apply=%silent", "cannot read the replica groups"),
        ("ROOT %r = f32[8,4] all-reduce(%p), replica_groups=mesh['x'=8] {'z'}", "name an axis that their mesh lacks"),
        ("ROOT %r = f32[8,4] collective-permute(%p)", "cannot read the source-target pairs"),
    ],
)
def test_what_cannot_be_counted_is_an_error(line: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        collectives_in_hlo(program(line, computations=CALLEES), WIDE)


def test_other_text_is_an_error() -> None:
    with pytest.raises(InternalError, match="no ENTRY"):
        collectives_in_hlo("module @jit_f {\n}\n", WIDE)


def test_what_the_gpu_compiler_writes() -> None:
    """XLA for eight H100s as a 2x4 mesh (jax 0.10.2, compiled without a GPU), metadata removed.

    a is float32[8,8] (256 bytes), b is bfloat16[8,8] (128 bytes):
    psum(a, (y, x)), psum((2a, b), x), psum_scatter(b + 1, (y, x)), all_gather(a, (x, y)), all_gather(b, x),
    all_gather(a > 0, x) (64 bytes), all_to_all(a, y), ppermute(a, (x, y)), and psum(·, y) five times in a scan.
    Everything is asynchronous there, the two gathers over x are one, bfloat16 stays 16 bits wide.
    """
    text = (Path(__file__).parent / "data" / "h100.hlo").read_text()
    assert text.count("all-gather-start(") == 2
    assert Counter(collectives_in_hlo(text, WIDE)) == {
        Collective("all_reduce", ("x", "y"), 256): 1,
        Collective("all_reduce", ("x",), 256): 1,
        Collective("all_reduce", ("x",), 128): 1,
        Collective("reduce_scatter", ("x", "y"), 128): 1,
        Collective("all_gather", ("x", "y"), 8 * 256): 1,
        Collective("all_gather", ("x",), 2 * 128): 1,
        Collective("all_gather", ("x",), 2 * 64): 1,
        Collective("all_to_all", ("y",), 256): 1,
        Collective("permute", ("x", "y"), 256): 1,
        Collective("all_reduce", ("y",), 256): 5,
    }


def test_concatenated_all_reduces_count_separately() -> None:
    def payloads(metadata: str) -> list[int]:
        joined = f"""
%join (a: f32[64], b: f32[32]) -> f32[96] {{
  %a = f32[64]{{0}} parameter(0)
  %b = f32[32]{{0}} parameter(1)
  ROOT %c = f32[96]{{0}} concatenate(%a, %b), dimensions={{0}}, metadata={{{metadata}}}
}}
"""
        text = program(
            "%a = f32[64]{0} parameter(1)",
            "%b = f32[32]{0} parameter(2)",
            "%c = f32[96]{0} fusion(%a, %b), kind=kLoop, calls=%join",
            "%s = f32[96]{0} all-reduce-start(%c), replica_groups={}",
            "ROOT %d = f32[96]{0} all-reduce-done(%s)",
            computations=joined,
        )
        return [collective.payload for collective in collectives_in_hlo(text, WIDE)]

    assert payloads('scheduling_name="c"') == [256, 128]
    assert payloads('op_name="jit(f)/concatenate"') == [384]  # the user's own


def test_16_bit_floats_sent_as_32_bit() -> None:
    def gather(*lines: str, computations: str = "") -> int:
        text = program("%n = bf16[8,4]{1,0} parameter(1)", *lines, computations=computations)
        (found,) = collectives_in_hlo(text, WIDE)
        return found.payload

    send = "%g = f32[64,4]{1,0} all-gather(%w), replica_groups={}, dimensions={0}"
    # 32 elements on each of 8 devices: 512 bytes in 16 bits, 1024 in 32.
    assert gather("%w = f32[8,4]{1,0} convert(%n)", send, "ROOT %t = f32[64,4]{1,0} tanh(%g)") == 512
    assert gather("%w = f32[8,4]{1,0} negate(%p)", send, "ROOT %c = bf16[64,4]{1,0} convert(%g)") == 512
    assert gather("%w = f32[8,4]{1,0} negate(%p)", send, "ROOT %t = f32[64,4]{1,0} tanh(%g)") == 1024
    assert gather(
        "%w = f32[8,4]{1,0} negate(%p)",
        send,
        "%c = bf16[64,4]{1,0} convert(%g)",
        "ROOT %t = (f32[64,4]{1,0}, bf16[64,4]{1,0}) tuple(%g, %c)",
    ) == 1024  # fmt: skip
    fused = """
%narrow (q: f32[64,4]) -> bf16[64,4] {
  %q = f32[64,4]{1,0} parameter(0)
  %k = f32[64,4]{0,1} copy(%q)
  ROOT %c = bf16[64,4]{0,1} convert(%k)
}
"""
    use = "ROOT %f = bf16[64,4]{0,1} fusion(%g), kind=kLoop, calls=%narrow"
    assert gather("%w = f32[8,4]{1,0} negate(%p)", send, use, computations=fused) == 512
