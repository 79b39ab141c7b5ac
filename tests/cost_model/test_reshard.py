"""Reshardings against sums by hand and against all short sequences; transfers against JAX's own regions."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar.cost_model.mesh_transfer import plan_transfer, tile_copies
from autopar.cost_model.reshard import (
    Resharder,
    StepPrice,
    shardings,
    step_axes,
    step_payload,
    step_result,
)
from autopar.cost_model.strided_reads import sent_along_inner
from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective, ReshardStep, Sharding, StepKind
from tests.resharding import plan_reshard, step_collectives

LINE = Mesh(tuple(range(8)), (8,), ("x",))
WIDE = Mesh(tuple(range(8)), (2, 4), ("x", "y"))
SQUARE = Mesh(tuple(range(4)), (2, 2), ("x", "y"))
CUBE = Mesh(tuple(range(8)), (2, 2, 2), ("x", "y", "z"))

LOCAL = ("slice", "mask")


def by_bytes(kind: StepKind, axes: tuple[str, ...], payload: int) -> float:
    """Long messages: bytes decide."""
    return payload * (1e-12 if kind in LOCAL else 2e-10 if kind == "all_reduce" else 1e-10) + 1e-9


def by_steps(kind: StepKind, axes: tuple[str, ...], payload: int) -> float:
    """Short messages: the number of collectives decides, wide ones are slower, axis x is slow."""
    return 1e-7 if kind in LOCAL else 1e-5 * len(axes) + 3e-6 * ("x" in axes) + payload * 1e-12


def parse(text: str) -> Sharding:
    """What `str` of a sharding prints."""
    dims, _, partial = text.partition("]")
    axes = [() if dim == "-" else tuple(dim.split("·")) for dim in dims[1:].split(",")]
    return Sharding(tuple(axes), tuple(partial[1:].split("·")) if partial else ())


def seconds(
    steps: tuple[ReshardStep, ...], shape: tuple[int, ...], source: Sharding, mesh: Mesh, price: StepPrice
) -> float:
    total, state = 0.0, source
    for step in steps:
        axes = step_axes(step, mesh)
        total += price(step.kind, axes, step_payload(step, shape, 4, state, mesh)) if axes else 0.0
        state = step_result(step, state)
    return total


# --- one step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "step", "after", "payload"),
    [
        # float32[8, 16] on a 2x4 mesh: 512 bytes.
        ("[-,-]+x·y", ReshardStep("all_reduce", ("x",)), "[-,-]+y", 512),
        ("[-,-]+x·y", ReshardStep("reduce_scatter", ("y", "x"), 1), "[-,y·x]", 512),  # its operand
        ("[x,-]+y", ReshardStep("reduce_scatter", ("y",), 0), "[x·y,-]", 256),
        ("[x·y,-]", ReshardStep("all_gather", ("y",), 0), "[x,-]", 256),
        ("[x·y,-]", ReshardStep("all_gather", ("x", "y"), 0), "[-,-]", 512),
        ("[x·y,-]", ReshardStep("all_to_all", ("y",), 0, 1), "[x,y]", 64),
        ("[x·y,-]", ReshardStep("permute", ("x", "y"), 0, order=("y", "x")), "[y·x,-]", 64),
        ("[x,-]", ReshardStep("slice", ("y",), 1), "[x,y]", 64),
        ("[x,-]", ReshardStep("mask", ("y",)), "[x,-]+y", 256),
    ],
)
def test_what_a_step_does(before: str, step: ReshardStep, after: str, payload: int) -> None:
    assert str(step_result(step, parse(before))) == after
    assert step_payload(step, (8, 16), 4, parse(before), WIDE) == payload


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ("[x,-]", ReshardStep("all_reduce", ("x",))),
        ("[x,-]+y", ReshardStep("reduce_scatter", ("x",), 1)),
        ("[x·y,-]", ReshardStep("all_gather", ("x",), 0)),  # not minor-most
        ("[y,-]", ReshardStep("all_gather", ("x", "y"), 0)),
        ("[x·y,-]", ReshardStep("all_to_all", ("x",), 0, 1)),
        ("[x,-]", ReshardStep("all_to_all", ("x",), 0, 0)),
        ("[x,-]", ReshardStep("slice", ("x",), 1)),
        ("[-,-]+x", ReshardStep("slice", ("x",), 1)),
        ("[x,-]", ReshardStep("mask", ("x",))),
        ("[x·y,-]", ReshardStep("permute", ("x", "y"), 0, order=("x", "x"))),
        ("[x,-]", ReshardStep("permute", ("x", "y"), order=("x", "y"))),
        ("[x,-]", ReshardStep("all_reduce", ())),
    ],
)
def test_a_step_that_does_not_apply_is_an_error(before: str, step: ReshardStep) -> None:
    with pytest.raises(InternalError, match="does not apply to"):
        step_result(step, parse(before))


# --- shortest paths ---------------------------------------------------------------------------------------------


def conceivable_steps(rank: int, mesh: Mesh) -> Iterator[ReshardStep]:
    """Every step there could be, without asking whether it applies."""
    tuples = [axes for n in range(1, len(mesh.axes) + 1) for axes in itertools.permutations(mesh.axes, n)]
    dims = range(rank)
    for axes in tuples:
        yield ReshardStep("all_reduce", axes)
        yield ReshardStep("mask", axes)
        for dim in dims:
            yield ReshardStep("reduce_scatter", axes, dim)
            yield ReshardStep("all_gather", axes, dim)
            yield ReshardStep("slice", axes, dim)
            for other in dims:
                yield ReshardStep("all_to_all", axes, dim, other)
            for order in itertools.permutations(axes):
                yield ReshardStep("permute", axes, dim, order=order)
        if len({mesh.axis_size(axis) for axis in axes}) == 1:
            yield ReshardStep("permute", axes, order=axes[::-1])


def cheapest_of_all_sequences(
    shape: tuple[int, ...], mesh: Mesh, price: StepPrice, source: Sharding, length: int
) -> dict[Sharding, float]:
    """The least seconds to everything that at most `length` steps reach, trying every sequence."""
    steps = list(conceivable_steps(len(shape), mesh))
    least: dict[Sharding, float] = {}

    def extend(state: Sharding, spent: float, left: int) -> None:
        least[state] = min(spent, least.get(state, math.inf))
        for step in steps if left else ():
            try:
                after = step_result(step, state)
            except InternalError:
                continue
            if after.divides(shape, mesh):
                extend(after, spent + seconds((step,), shape, state, mesh, price), left - 1)

    extend(source, 0.0, length)
    return least


@pytest.mark.parametrize("price", [by_bytes, by_steps])
@pytest.mark.parametrize(
    ("mesh", "shape", "source", "length"),
    [
        (LINE, (16, 8), "[x,-]", 3),
        (LINE, (16, 8), "[-,-]+x", 3),
        (WIDE, (8, 16), "[x·y,-]", 3),
        (WIDE, (8, 16), "[y,-]+x", 3),
        (WIDE, (2, 16), "[x,y]", 3),  # dimension 0 cannot hold y
        (SQUARE, (4, 4), "[x,y]", 3),
        (SQUARE, (4,), "[-]+x·y", 4),
    ],
)
def test_nothing_is_cheaper(mesh: Mesh, shape: tuple[int, ...], source: str, length: int, price: StepPrice) -> None:
    start, resharder = parse(source), Resharder(mesh, price)
    least = cheapest_of_all_sequences(shape, mesh, price, start, length)
    assert set(least) == {state for state in shardings(len(shape), mesh) if state.divides(shape, mesh)}
    for target, brute in least.items():
        steps = resharder.plan(shape, 4, start, target)
        found = seconds(steps, shape, start, mesh, price)
        assert found == pytest.approx(resharder.time(shape, 4, start, target), rel=1e-12)
        # No sequence of `length` is cheaper; a plan no longer than that is among them.
        assert found <= brute * (1 + 1e-12), (str(target), steps)
        if len(steps) <= length:
            assert found == pytest.approx(brute, rel=1e-12)


@pytest.mark.parametrize(("mesh", "rank"), [(LINE, 3), (WIDE, 2), (WIDE, 3), (CUBE, 1)])
def test_plans_are_legal_and_the_matrix_agrees_with_them(mesh: Mesh, rank: int) -> None:
    shape = (12, 16, 8)[:rank]  # y does not fit into dimension 0 twice, x·y not at all
    states = [state for state in shardings(rank, mesh) if state.divides(shape, mesh)]
    assert 0 < len(states) < len(shardings(rank, mesh))
    resharder = Resharder(mesh, by_bytes)
    matrix = resharder.matrix(shape, 4, states, states[::2])
    for (i, source), (j, target) in itertools.product(enumerate(states), enumerate(states[::2])):
        steps, state = resharder.plan(shape, 4, source, target), source
        for step in steps:
            state = step_result(step, state)
            assert state.divides(shape, mesh)
        assert state == target
        assert matrix[i, j] == pytest.approx(seconds(steps, shape, source, mesh, by_bytes), rel=1e-12)
        assert steps == plan_reshard(shape, 4, source, target, mesh, by_bytes) if i < 2 else True


def test_known_routes() -> None:
    """What wins when bytes decide, with the payloads."""
    shape = (8, 16)  # float32: 512 bytes

    def route(source: str, target: str, mesh: Mesh = WIDE, price: StepPrice = by_bytes) -> tuple[Collective, ...]:
        before = parse(source)
        return step_collectives(plan_reshard(shape, 4, before, parse(target), mesh, price), shape, 4, before, mesh)

    assert route("[x,-]", "[x,-]") == ()
    assert route("[-,-]+x", "[-,-]", price=by_steps) == (Collective("all_reduce", ("x",), 512),)
    # Replicated over y: each of y sums a quarter (512/4 bytes), and one gather brings all eight parts together.
    assert route("[-,-]+x", "[-,-]") == (
        Collective("reduce_scatter", ("x",), 128),
        Collective("all_gather", ("x", "y"), 512),
    )
    # Summed and cut: one reduce-scatter over both axes at once, axes in mesh order whatever the tiles' order.
    assert route("[-,-]+x·y", "[-,y·x]") == (Collective("reduce_scatter", ("x", "y"), 512),)
    # Columns to rows: each device keeps 512/4 bytes.
    assert route("[y,-]", "[-,y]") == (Collective("all_to_all", ("y",), 128),)
    # Slicing is free beside sending: cut first, and no collective at all.
    assert route("[x,-]", "[x,y]") == ()
    # Axes of equal size that change places: one permute of what a device holds, a quarter or a half.
    assert route("[x,y]", "[y,x]", SQUARE) == (Collective("permute", ("x", "y"), 128),)
    assert route("[x,-]", "[y,-]", SQUARE) == (Collective("permute", ("x", "y"), 256),)


def test_axes_of_size_one_cost_nothing() -> None:
    mesh = Mesh((0, 1), (1, 2), ("x", "y"))
    resharder = Resharder(mesh, by_bytes)
    source, target = parse("[x,-]+y"), parse("[y,-]+x")
    steps = resharder.plan((4, 4), 4, source, target)
    assert step_collectives(steps, (4, 4), 4, source, mesh) == (Collective("reduce_scatter", ("y",), 64),)
    assert resharder.time((4, 4), 4, source, target) == by_bytes("reduce_scatter", ("y",), 64)


def test_prices_are_asked_once_per_bytes_and_divisibility() -> None:
    asked: list[tuple[str, tuple[str, ...], int]] = []

    def price(kind: StepKind, axes: tuple[str, ...], payload: int) -> float:
        asked.append((kind, axes, payload))
        return by_bytes(kind, axes, payload)

    resharder = Resharder(WIDE, price)
    states = shardings(2, WIDE)
    first = resharder.matrix((8, 16), 4, states, states)
    assert len(asked) == len(set(asked)) > 0
    before = len(asked)
    np.testing.assert_array_equal(resharder.matrix((16, 8), 4, states, states), first)  # both divide by 8
    np.testing.assert_array_equal(resharder.matrix((8, 8), 8, states, states), first)
    assert len(asked) == before
    assert not np.array_equal(resharder.matrix((16, 16), 4, states, states), first)
    assert len(asked) == 2 * before


def test_sums_are_made_in_four_bytes() -> None:
    """128 elements of two bytes: 128 * 4 to sum, 128 * 2 to gather."""
    assert step_payload(ReshardStep("all_reduce", ("x",)), (8, 16), 2, parse("[-,-]+x"), WIDE) == 512
    assert step_payload(ReshardStep("all_gather", ("x",), 0), (8, 16), 2, parse("[x,-]"), WIDE) == 256


def test_impossible_shardings_are_named() -> None:
    resharder = Resharder(WIDE, by_bytes)
    with pytest.raises(InternalError, match=r"\[y,-\] does not divide \(6, 8\)"):
        resharder.plan((6, 8), 4, parse("[y,-]"), parse("[-,-]"))
    with pytest.raises(InternalError, match=r"\[z,-\] is no sharding of \(6, 8\)"):
        resharder.time((6, 8), 4, parse("[z,-]"), parse("[-,-]"))


# --- between meshes ---------------------------------------------------------------------------------------------


def regions(shape: tuple[int, ...], sharding: Sharding, mesh: Mesh) -> dict[int, list[tuple[int, int]]]:
    """By position: what JAX says that each device of the mesh holds."""
    devices = jax.devices()
    jax_mesh = jax.sharding.Mesh(np.array([devices[i] for i in range(mesh.size)]).reshape(mesh.shape), mesh.axes)
    named = NamedSharding(jax_mesh, PartitionSpec(*sharding.dims))
    return {
        devices.index(device): [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        for device, index in named.devices_indices_map(shape).items()
    }


def part(region: list[tuple[int, int]], cuts: Sequence[int], number: int) -> list[tuple[int, int]]:
    """The region of a part of a tile."""
    found = []
    for (start, stop), n, at in zip(region, cuts, np.unravel_index(number, cuts), strict=True):
        size = (stop - start) // n
        found.append((start + int(at) * size, start + (int(at) + 1) * size))
    return found


def test_what_is_sent_along_an_inner_dimension() -> None:
    """For all pairs of shardings at once, against the one collective of each plan that has a single one."""
    shape = (8, 16, 8)
    each = [s for s in shardings(3, WIDE) if s.divides(shape, WIDE)]
    is_along = sent_along_inner(shape, each, each, WIDE)
    seen = {True: 0, False: 0}
    for (i, before), (j, after) in itertools.product(enumerate(each), repeat=2):
        steps = plan_reshard(shape, 4, before, after, WIDE, by_bytes)
        sent = [s for s in steps if s.kind not in LOCAL and step_axes(s, WIDE)]
        if len(steps) != 1 or not sent:
            continue
        (step,) = sent
        moves = step.kind in ("all_gather", "reduce_scatter", "all_to_all")
        inner = moves and math.prod(after.local_shape(shape, WIDE)[: max(step.dim, step.to_dim)]) > 1
        assert is_along[i, j] == inner, (str(before), str(after), step)
        seen[bool(inner)] += 1
    assert min(seen.values()) > 30


def test_copies_bring_every_device_its_region_and_share_the_work() -> None:
    shape = (8, 24)
    three = Mesh((0, 1, 2), (3,), ("x",))
    pairs = unlike = 0
    for source_mesh, target_mesh in itertools.product((LINE, WIDE, SQUARE, three), repeat=2):
        for sent, received in itertools.product(shardings(2, source_mesh), shardings(2, target_mesh)):
            both = sent.divides(shape, source_mesh) and received.divides(shape, target_mesh)
            if sent.partial or received.partial or not both:
                continue
            tiles = tile_copies(shape, sent, source_mesh, received, target_mesh)
            held, wanted = regions(shape, sent, source_mesh), regions(shape, received, target_mesh)
            places = math.prod(tiles.joins)
            asked = [(copy.target, copy.place) for copy in tiles.copies]
            assert asked == list(itertools.product(range(target_mesh.size), range(places)))
            for copy in tiles.copies:
                arrives = part(wanted[copy.target], tiles.joins, copy.place)
                assert part(held[copy.source], tiles.cuts, copy.cut) == arrives
            # Every tile has as many holders as any other: no device sends more than its share, rounded up.
            sends = [sum(copy.source == position for copy in tiles.copies) for position in range(source_mesh.size)]
            assert max(sends) == math.ceil(len(tiles.copies) / source_mesh.size)
            pairs += 1
            unlike += tiles.cuts != tiles.joins
    assert (pairs, unlike) == (729, 652)


def test_what_cannot_be_copied_tile_by_tile_is_refused() -> None:
    for shape, sent in (((8, 16), "[x,-]+y"), ((6, 16), "[y,-]")):
        with pytest.raises(InternalError, match="tile by tile"):
            tile_copies(shape, parse(sent), WIDE, parse("[x,-]"), SQUARE)


FIRST = Mesh((0, 1, 2, 3), (4,), ("x",))
SECOND = Mesh((4, 5, 6, 7), (4,), ("x",))


def at_once(copies: Any, seconds: Callable[[int, int], float]) -> float:
    """A device's copies follow one another, those of different devices overlap."""
    busy: dict[int, float] = defaultdict(float)
    for giver, taker in copies:
        busy[giver] += seconds(giver, taker)
        busy[taker] += seconds(giver, taker)
    return max(busy.values(), default=0.0)


def transfer(source: str, target: str, step: StepPrice, second: float) -> tuple[str, str, float]:
    """A float32[8, 16] (512 bytes) from four devices to four others, at `second` seconds a byte."""

    def price(giver: int, taker: int, nbytes: int) -> float:
        return nbytes * second if giver < 4 <= taker else math.nan

    plan = plan_transfer(
        (8, 16),
        4,
        parse(source),
        parse(target),
        Resharder(FIRST, step),
        Resharder(SECOND, step),
        lambda copies, nbytes: at_once(
            copies, lambda giver, taker: nbytes * second if giver < 4 <= taker else math.nan
        ),
    )
    return str(plan.sent), str(plan.received), plan.seconds


def test_slow_links_send_every_tile_once_and_gather_at_the_target() -> None:
    sent, received, time = transfer("[-,-]", "[-,-]", by_bytes, 1e-6)
    assert sent == received != "[-,-]"
    # A slice of 128 bytes, a copy of 128 bytes, a gather of 512.
    assert time == pytest.approx(128e-12 + 1e-9 + 128e-6 + 512e-10 + 1e-9, rel=1e-12)


def test_fast_links_send_as_it_is() -> None:
    assert transfer("[-,-]", "[-,-]", by_steps, 1e-12) == ("[-,-]", "[-,-]", 512e-12)
    assert transfer("[x,-]", "[x,-]", by_steps, 1e-12) == ("[x,-]", "[x,-]", 128e-12)


def test_partial_values_are_summed_before_they_are_sent() -> None:
    sent, received, time = transfer("[-,-]+x", "[x,-]", by_bytes, 1e-6)
    assert (sent, received) == ("[x,-]", "[x,-]")
    # A reduce-scatter of 512 bytes, copies of 128.
    assert time == pytest.approx(512e-10 + 1e-9 + 128e-6, rel=1e-12)


def test_transfers_between_meshes_of_different_sizes_are_optimal() -> None:
    """Against every pair of shardings."""
    big, small = WIDE, Mesh((8, 9), (2,), ("x",))
    at_big, at_small = Resharder(big, by_steps), Resharder(small, by_steps)

    def link(giver: int, taker: int, nbytes: int) -> float:
        return nbytes * (3e-7 if giver % 2 else 1e-7)

    def links(copies: Any, nbytes: int) -> float:
        return at_once(copies, lambda giver, taker: link(giver, taker, nbytes))

    shape = (8, 16)
    for source, target in itertools.product(shardings(2, big), shardings(2, small)):
        plan = plan_transfer(shape, 4, source, target, at_big, at_small, links)
        least = math.inf
        for sent, received in itertools.product(shardings(2, big), shardings(2, small)):
            if sent.partial or received.partial:
                continue
            resharded = at_big.time(shape, 4, source, sent), at_small.time(shape, 4, received, target)
            tiles = tile_copies(shape, sent, big, received, small)
            if min(resharded) > 0 and math.prod((*tiles.cuts, *tiles.joins)) > 1:
                continue
            held = 4 * math.prod(sent.local_shape(shape, big))
            arrived = 4 * math.prod(received.local_shape(shape, small))
            busy: dict[int, float] = {}
            for copy in tiles.copies:
                taker = small.devices[copy.target]
                spent = link(copy.source, taker, held // math.prod(tiles.cuts))
                busy[copy.source] = busy.get(copy.source, 0) + spent
                busy[taker] = busy.get(taker, 0) + spent
            local = at_big.local_time(held) if math.prod(tiles.cuts) > 1 else 0.0
            local += at_small.local_time(arrived) if math.prod(tiles.joins) > 1 else 0.0
            least = min(least, sum(resharded) + local + max(busy.values()))
        assert plan.seconds == pytest.approx(least, rel=1e-12)
