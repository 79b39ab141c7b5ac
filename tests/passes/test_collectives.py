"""Reshard steps executed on eight devices, and what was predicted, lowered and compiled compared."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.cost_model.reshard import Resharder, moves, permutation, shardings, step_result
from autopar.errors import InternalError
from autopar.ir.graph import accumulator_dtype
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective, ReshardStep, Sharding, StepKind
from autopar.passes.collectives import apply_steps, count_collectives
from autopar.runtime.hlo import collectives_in_hlo
from tests.resharding import plan_reshard, step_collectives

LINE = Mesh(tuple(range(8)), (8,), ("x",))
WIDE = Mesh(tuple(range(8)), (2, 4), ("x", "y"))
TALL = Mesh(tuple(range(8)), (4, 2), ("x", "y"))
SQUARE = Mesh(tuple(range(4)), (2, 2), ("x", "y"))
CUBE = Mesh(tuple(range(8)), (2, 2, 2), ("x", "y", "z"))
FLAT = Mesh(tuple(range(8)), (1, 8), ("x", "y"))

Case = tuple[Sharding, Sequence[ReshardStep], Sharding]


def price(kind: StepKind, axes: tuple[str, ...], payload: int) -> float:
    """A microsecond for each step, ten for a collective, then 10 GB/s, half as much for an all-reduce."""
    if kind in ("slice", "mask"):
        return 1e-6 + payload / 1e11
    return 1e-5 + payload * (2 if kind == "all_reduce" else 1) / 1e10


def region(sharding: Sharding, shape: tuple[int, ...], at: dict[str, int], mesh: Mesh) -> tuple[slice, ...]:
    """The part of the array that the device at these coordinates holds."""
    slices = []
    for size, axes in zip(shape, sharding.dims, strict=True):
        start, length = 0, size
        for axis in axes:
            length //= mesh.axis_size(axis)
            start += at[axis] * length
        slices.append(slice(start, start + length))
    return tuple(slices)


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    return [dict(zip(mesh.axes, at, strict=True)) for at in np.ndindex(*mesh.shape)]


def scatter(whole: np.ndarray, sharding: Sharding, mesh: Mesh, random: np.random.Generator) -> np.ndarray:
    """The pieces [device, ...] of an array; partial values get random partial sums with the right sum."""
    partial_sums: dict[tuple[int, ...], np.ndarray] = {(): whole}
    for axis in sharding.partial:
        split: dict[tuple[int, ...], np.ndarray] = {}
        for key, value in partial_sums.items():
            parts = random.integers(-99, 99, (mesh.axis_size(axis) - 1, *whole.shape)).astype(whole.dtype)
            for i, part in enumerate([*parts, value - parts.sum(0, dtype=whole.dtype)]):
                split[*key, i] = part
        partial_sums = split
    return np.stack(
        [
            partial_sums[tuple(at[axis] for axis in sharding.partial)][region(sharding, whole.shape, at, mesh)]
            for at in coordinates(mesh)
        ]
    )


def assert_pieces_are(pieces: np.ndarray, whole: np.ndarray, sharding: Sharding, mesh: Mesh, what: str) -> None:
    """Each device's piece, summed over the devices that hold the other partial sums, is its part of the array."""
    summed = pieces.reshape(*mesh.shape, *pieces.shape[1:])
    for axis in sharding.partial:
        summed = np.broadcast_to(summed.sum(mesh.axes.index(axis), keepdims=True, dtype=summed.dtype), summed.shape)
    for at in coordinates(mesh):
        piece = summed[tuple(at[axis] for axis in mesh.axes)]
        np.testing.assert_array_equal(piece, whole[region(sharding, whole.shape, at, mesh)], err_msg=f"{what} at {at}")


def check(cases: Sequence[Case], shape: tuple[int, ...], mesh: Mesh, dtype: Any = np.int32) -> None:
    """Run all cases in one program and compare values and collectives.

    Each case has its own input, or XLA would share the steps that two cases begin with.
    """
    random = np.random.default_rng(0)
    wholes = [random.integers(-99, 99, shape).astype(dtype) for _ in cases]
    inputs = [
        scatter(whole, source, mesh, random).astype(accumulator_dtype(whole.dtype) if source.partial else whole.dtype)
        for whole, (source, _, _) in zip(wholes, cases, strict=True)
    ]

    def body(pieces: list[Any]) -> list[Any]:
        return [
            apply_steps(piece[0], steps, source, mesh, np.dtype(dtype))[None]
            for piece, (source, steps, _) in zip(pieces, cases, strict=True)
        ]

    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.shape)
    spec = PartitionSpec(mesh.axes)
    jax_mesh = jax.sharding.Mesh(devices, mesh.axes)
    mapped = jax.jit(jax.shard_map(body, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False))
    traced = mapped.trace(inputs)
    # Without LLVM's optimisation of the kernels: XLA's passes over the HLO are the same, in half the time.
    compiled = traced.lower().compile({"xla_backend_optimization_level": 0})
    placed = jax.device_put(inputs, jax.sharding.NamedSharding(jax_mesh, spec))

    for result, whole, (source, steps, target) in zip(compiled(placed), wholes, cases, strict=True):
        assert_pieces_are(np.asarray(result), whole, target, mesh, f"{source} -> {target} by {steps}")
    itemsize = np.dtype(dtype).itemsize
    predicted = Counter(
        collective
        for source, steps, _ in cases
        for collective in step_collectives(steps, shape, itemsize, source, mesh)
    )
    assert Counter(count_collectives(traced.jaxpr, mesh)) == predicted
    assert Counter(collectives_in_hlo(compiled.as_text(), mesh)) == predicted


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        pytest.param(mesh, shape, marks=[pytest.mark.slow] * (mesh is WIDE and len(shape) == 3))
        for mesh in (LINE, WIDE, TALL)
        for shape in ((8, 16), (8, 16, 24))
    ],
    ids=[f"{mesh}-{shape}" for mesh in ("8", "2x4", "4x2") for shape in ("matrix", "cube")],
)
def test_every_sharding_to_every_sharding(mesh: Mesh, shape: tuple[int, ...]) -> None:
    resharder = Resharder(mesh, price)
    states = shardings(len(shape), mesh)
    cases = [(s, resharder.plan(shape, 4, s, t), t) for s in states for t in states]
    assert len(cases) == {(1, 2): 16, (1, 3): 25, (2, 2): 324, (2, 3): 784}[len(mesh.axes), len(shape)]
    if (mesh, len(shape)) == (TALL, 3):  # differs from WIDE in which axis is major only: every fifth saves a minute
        cases = cases[::5]
    for start in range(0, len(cases), 98):
        check(cases[start : start + 98], shape, mesh)


@pytest.mark.parametrize("mesh", [WIDE, SQUARE, FLAT], ids=["2x4", "2x2", "1x8"])
def test_every_single_step(mesh: Mesh) -> None:
    cases = [(s, (step,), step_result(step, s)) for s in shardings(2, mesh) for step in moves(s, mesh)]
    assert {step.kind for _, (step,), _ in cases} == {
        "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "slice", "mask",
    }  # fmt: skip
    for start in range(0, len(cases), 98):
        check(cases[start : start + 98], (8, 16), mesh)


def test_permutes_over_three_axes() -> None:
    mesh = CUBE
    cases = [
        (s, (step,), step_result(step, s))
        for s in shardings(2, mesh)
        for step in moves(s, mesh)
        if step.kind == "permute" and len(s.axes) + len(s.partial) == 3
    ]
    check(cases[::5], (8, 8), mesh)


def test_values_of_every_element_type() -> None:
    source, target = Sharding((("x",), ("y",))), Sharding((("y",), ("x",)))
    steps = plan_reshard((8, 8), 4, source, target, WIDE, price)
    for dtype in (np.float32, jnp.bfloat16, np.float16, np.int8):
        check([(source, steps, target)], (8, 8), WIDE, dtype)
    summed = Sharding((("x",), ()), ("y",))
    steps = plan_reshard((8, 8), 4, summed, target, WIDE, price)
    for dtype in (np.float32, np.int8):  # 16 bits cannot hold the sums
        check([(summed, steps, target)], (8, 8), WIDE, dtype)


def test_16_bit_floats_count_as_such() -> None:
    # On the CPU, XLA sends all of these as float32. 4 x 8 elements of 2 bytes; the gather's result has 8 x 8.
    lowered, compiled = counted(
        lambda x: (
            jax.lax.psum(x, "x"),
            jax.lax.psum_scatter(x + 1, "y", tiled=True),
            jax.lax.all_gather(x * 2, "x", tiled=True),
            jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]),
        ),
        np.ones((4, 8), jnp.bfloat16),
    )
    assert lowered == compiled == Counter(
        [
            Collective("all_reduce", ("x",), 64),
            Collective("reduce_scatter", ("y",), 64),
            Collective("all_gather", ("x",), 128),
            Collective("permute", ("x",), 64),
        ]
    )  # fmt: skip
    # A float32 sum that the user then rounds is a float32 sum.
    lowered, compiled = counted(lambda x: jax.lax.psum(x, "x").astype(jnp.bfloat16), np.ones((4, 8), np.float32))
    assert lowered == compiled == Counter([Collective("all_reduce", ("x",), 128)])


def test_keys_travel_as_their_words() -> None:
    source, target = Sharding((("x",),)), Sharding(((),))
    steps = plan_reshard((8,), 8, source, target, LINE, price)
    keys = jax.random.split(jax.random.key(3), 8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    gather = jax.jit(
        jax.shard_map(
            lambda piece: apply_steps(piece, steps, source, LINE, piece.dtype),
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    np.testing.assert_array_equal(jax.random.key_data(gather(keys)), jax.random.key_data(keys))
    # 8 keys of 8 bytes
    assert count_collectives(gather.trace(keys).jaxpr, LINE) == (Collective("all_gather", ("x",), 64),)


def test_permutation_pairs_by_hand() -> None:
    # Tiles of 6 cut over (x=2, y=3) then over (y, x): device (i, j) held tile 3i+j and gets tile 2j+i.
    mesh = Mesh(tuple(range(6)), (2, 3), ("x", "y"))
    axes, pairs = permutation(ReshardStep("permute", ("x", "y"), 0, order=("y", "x")), mesh)
    # targets (0,0)..(1,2) want tiles 0 2 4 1 3 5
    assert axes == ("x", "y")
    assert sorted(pairs, key=lambda pair: pair[1]) == [(0, 0), (2, 1), (4, 2), (1, 3), (3, 4), (5, 5)]
    # In a cube, (x, y, z) -> (z, y, x) leaves y alone.
    axes, pairs = permutation(ReshardStep("permute", ("x", "y", "z"), 0, order=("z", "y", "x")), CUBE)
    assert (axes, pairs) == (("x", "z"), ((0, 0), (1, 2), (2, 1), (3, 3)))


# --- counting ---------------------------------------------------------------------------------------------------


def counted(body: Any, *args: Any) -> tuple[Counter[Collective], Counter[Collective]]:
    """The collectives of a function of replicated arguments on the 2x4 mesh: in its jaxpr, in its HLO."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    spec = PartitionSpec()
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    traced = mapped.trace(*args)
    return (
        Counter(count_collectives(traced.jaxpr, WIDE)),
        Counter(collectives_in_hlo(traced.lower().compile().as_text(), WIDE)),
    )


def test_loops_and_calls_are_counted_as_often_as_they_run() -> None:
    def body(x: jax.Array) -> Any:
        def once(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(carry, "y")), None

        looped = jax.lax.scan(once, x, length=5)[0]
        return jax.jit(lambda v: jax.lax.all_gather(v, ("x", "y"), tiled=True))(looped)

    lowered, compiled = counted(body, np.ones((4, 4), np.float32))
    # psum: 4*4*4 bytes; gather: 8 times as much.
    assert lowered == compiled == {
        Collective("all_reduce", ("y",), 64): 5,
        Collective("all_gather", ("x", "y"), 512): 1,
    }  # fmt: skip


def test_a_combined_collective_counts_per_operand() -> None:
    lowered, compiled = counted(
        lambda a, b: jax.lax.psum((a, b), "x"), np.ones((4, 4), np.float32), np.ones(3, np.float32)
    )
    assert lowered == compiled == Counter([Collective("all_reduce", ("x",), n) for n in (64, 12)])


def test_with_checked_replication_the_collectives_are_the_same() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "x"), jax.lax.pmax(x, ("y", "x"))

    out_specs = PartitionSpec(None, "y"), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x", "y"), out_specs=out_specs)
    traced = jax.jit(mapped).trace(np.ones((4, 8), np.float32))
    # A piece is 2 x 2.
    expected = (Collective("all_reduce", ("x",), 16), Collective("all_reduce", ("x", "y"), 16))
    assert count_collectives(traced.jaxpr, WIDE) == expected


def test_what_runs_an_unknown_number_of_times_is_an_error() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def traced(body: Any) -> Any:
        spec = PartitionSpec()
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped).trace(np.float32(3))

    endless = traced(lambda x: jax.lax.while_loop(lambda v: v < 100, lambda v: jax.lax.psum(v, "x"), x))
    with pytest.raises(InternalError, match="`while`"):
        count_collectives(endless.jaxpr, WIDE)
    with pytest.raises(InternalError, match="trip count is not known"):
        collectives_in_hlo(endless.lower().compile().as_text(), WIDE)

    quiet = traced(lambda x: jax.lax.while_loop(lambda v: v < 100, lambda v: v * 2, x))
    assert count_collectives(quiet.jaxpr, WIDE) == ()
    assert collectives_in_hlo(quiet.lower().compile().as_text(), WIDE) == ()

    uneven = traced(lambda x: jax.lax.cond(x > 0, lambda v: jax.lax.psum(v, "x"), lambda v: v, x))
    with pytest.raises(InternalError, match="`cond`"):
        count_collectives(uneven.jaxpr, WIDE)
    with pytest.raises(InternalError, match="branches"):
        collectives_in_hlo(uneven.lower().compile().as_text(), WIDE)
