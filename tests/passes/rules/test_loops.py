"""Equations with a body: every factor, and every pair of them, computed in pieces, equals the whole.

The pieces run together under `jax.shard_map` with an axis for each factor, since bodies may add up over the pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from autopar.ir.graph import Equation, Value
from autopar.ir.mesh import Mesh
from autopar.ir.rule import DimMap, Gathering, Local, Rule, Scattering
from autopar.ir.sharding import Collective, Sharding
from autopar.ir.strategy import REPLICATED, AxisChoice, Gathered, Split
from autopar.passes.intra_op.strategies import enumerate_assignments, inner_collectives, operand_shardings
from autopar.passes.rules import propagation as bodies
from autopar.passes.rules import table
from autopar.passes.rules.building import replicated
from autopar.passes.rules.table import find_fault, rule_of
from autopar.tracing.trace import trace
from tests.passes.rules import harness
from tests.passes.rules.loop_cases import (
    BATCH,
    CASES,
    FORWARD,
    HEADS,
    HIDDEN,
    LAYER_WEIGHTS,
    LAYERS,
    TIME,
    WIDTH,
    loops,
    normal,
)


@dataclasses.dataclass(frozen=True)
class Together(Local):
    """A `Local`: one of the pieces that run side by side."""

    rule: Rule
    split: Mapping[int, int]

    def size(self, factor: int) -> int:
        return self.rule.factors[factor] // self.split.get(factor, 1)

    def is_split(self, factor: int) -> bool:
        return factor in self.split

    def start(self, factor: int) -> Any:
        return lax.axis_index(f"f{factor}") * self.size(factor) if self.is_split(factor) else 0

    def total(self, factor: int, x: Any, value: Value) -> Any:
        return lax.psum(x, f"f{factor}")

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        compare: Any = lax.pmax if largest else lax.pmin
        return compare(x, f"f{factor}")

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        assert not self.is_split(factor)
        return x


def window(rule: Rule, dims: DimMap, split: Mapping[int, int], index: Mapping[int, int]) -> tuple[slice, ...]:
    """Where a piece lies in an array unfolded into its factors."""
    sizes = {f: rule.factors[f] // split.get(f, 1) for dim in dims for f in dim}
    return tuple(slice(index.get(f, 0) * n, (index.get(f, 0) + 1) * n) for f, n in sizes.items())


def unfolded(rule: Rule, dims: DimMap) -> list[int]:
    return [rule.factors[f] for dim in dims for f in dim]


def in_pieces(equation: Equation, rule: Rule, split: Mapping[int, int], operands: Sequence[Any]) -> list[Any]:
    """The results, put together from pieces by the rule."""
    indices = [dict(zip(split, index, strict=True)) for index in np.ndindex(*split.values())]

    def piece(x: Any, dims: DimMap, index: Mapping[int, int]) -> Any:
        part = x.reshape(unfolded(rule, dims))[window(rule, dims, split, index)]
        return part.reshape([math.prod(rule.factors[f] // split.get(f, 1) for f in dim) for dim in dims])

    names = tuple(f"f{f}" for f in split)

    def run(*xs: Any) -> Any:
        local = [x.reshape(x.shape[len(split) :]) for x in xs]
        results = rule.emit(Together(rule, split), equation, local)
        return tuple(x.reshape(*[1] * len(split), *x.shape) for x in results)

    # Slices of NumPy arrays, which need not be compiled one by one.
    whole_operands = [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in operands]
    pieces = [
        (jnp if isinstance(x, jax.Array) else np)
        .stack([piece(x, dims, index) for index in indices])
        .reshape(*split.values(), *[math.prod(rule.factors[f] // split.get(f, 1) for f in dim) for dim in dims])
        for x, dims in zip(whole_operands, rule.inputs, strict=True)
    ]
    mesh = jax.make_mesh(tuple(split.values()), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    spec = PartitionSpec(*names)
    together = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    found = []
    for k, (results, dims) in enumerate(zip(together(*pieces), rule.outputs, strict=True)):
        if jnp.issubdtype(results.dtype, jax.dtypes.prng_key):
            results = jax.random.key_data(results)[..., 0]
        results = np.asarray(results)
        whole = np.zeros(unfolded(rule, dims), results.dtype)
        held = {f for dim in dims for f in dim}
        first = {f for f in split if f not in held and not rule.is_partial_sum(f, k)}  # alike on all pieces
        for index in indices:
            part = results[tuple(index.values())]
            place = window(rule, dims, split, index)
            if any(index[f] for f in first):
                same = results[tuple(0 if f in first else n for f, n in index.items())]
                np.testing.assert_allclose(part, same, rtol=1e-5, atol=1e-5)
            else:
                whole[place] += part.reshape(whole[place].shape)
        found.append(whole.reshape(equation.outputs[k].shape))
    return found


LARGE = ("layers", "nested")  # each of their pairs takes seconds to compile
PAIRS = [
    *((name, 3 if name not in LARGE else 0) for name in [*CASES, *FORWARD]),
    *(pytest.param(name, 3, marks=pytest.mark.slow) for name in LARGE),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "paired"), PAIRS)
def test_pieces_give_the_whole(name: str, paired: int) -> None:
    """Each factor alone, and pairs of so many."""
    tried = 0
    for eqn, operands, expected in loops(name):
        rule = rule_of(eqn)
        assert find_fault(eqn, rule) is None
        by_work = sorted(rule.splittable, key=lambda f: rule.work({f: 2}))
        least = {f: min(n for n in range(2, 9) if rule.factors[f] % n == 0) for f in by_work[:4]}
        splits = [{f: n} for f, n in least.items()]
        pairs = itertools.combinations(by_work[:paired], 2)
        splits += [{f: least[f], g: least[g]} for f, g in pairs if least[f] * least[g] <= 8]
        for split in splits:
            tried += 1
            for k, (x, y) in enumerate(zip(in_pieces(eqn, rule, split, operands), expected, strict=True)):
                if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
                    continue  # compared among the pieces
                np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5, err_msg=f"{split}, result {k}")
    assert tried > 0


def test_a_loop_over_examples_is_cut_by_examples() -> None:
    """`while`: no sum in the loop, though what it adds up leaves it as partial sums."""
    ((eqn, _, _),) = loops("powers")
    rule = rule_of(eqn)
    examples = [f for f in rule.splittable if rule.factors[f] == BATCH]
    assert len(examples) == 1
    assert not any(s.factor == examples[0] for s in rule.sums)
    assert sum(rule.is_partial_sum(examples[0], k) for k in range(len(rule.outputs))) == 2


def test_a_loop_of_each_example_is_cut_by_examples() -> None:
    """Its pieces turn differently often, so that they may need nothing of one another in the loop."""
    ((eqn, _, (_, rounds)),) = loops("each its own")
    assert len(set(rounds.tolist())) > 2
    rule = rule_of(eqn)
    (examples,) = [f for f in rule.splittable if rule.factors[f] == BATCH]
    assert all(any(examples in dim for dim in dims) for dims in rule.outputs)
    assert not any(s.factor == examples for s in rule.sums)


def test_whether_all_are_done_is_counted_over_the_pieces() -> None:
    ((eqn, _, (_, done, rounds)),) = loops("until all")
    assert done.all() and 2 < rounds < 9
    rule = rule_of(eqn)
    (examples,) = [f for f in rule.splittable if rule.factors[f] == BATCH]
    assert [(s.size, s.itemsize) for s in rule.sums if s.factor == examples] == [(1, 4)]


@pytest.mark.parametrize(("name", "size"), [("scaled", BATCH), ("by vocabulary", 12), ("converging", BATCH)])
def test_the_largest_is_compared_in_the_loop(name: str, size: int) -> None:
    """Where rounds go on with the largest of what is cut, in four bytes; a gradient's sums are as before."""
    eqn, _, _ = loops(name)[0]
    rule = rule_of(eqn)
    (factor,) = [f for f in rule.splittable if rule.factors[f] == size]
    assert any((s.size, s.itemsize, s.sum_itemsize) in ((1, 4, 4), (BATCH, 4, 4)) for s in rule.sums)
    assert rule.communicates(factor)


def test_the_points_of_a_whole_loop_may_be_more_than_a_float_can_say() -> None:
    def sorted_with(x: Any, others: Any) -> Any:
        return lax.scan(lambda x, _: (jnp.sort(x + sum(others), 0), None), x, None, length=2)[0]

    large = jax.ShapeDtypeStruct((4096, 3), jnp.float32)
    graph = trace(sorted_with, (large, [jax.ShapeDtypeStruct((1, 1), jnp.float32)] * 2), {}, name="sorted")
    (eqn,) = [eqn for eqn in graph.equations if eqn.primitive.name == "scan"]
    many = dataclasses.replace(eqn, inputs=eqn.inputs * 200)
    rule = replicated(many)
    assert rule.points() > 10**308
    assert rule.work({}) == pytest.approx(sum(math.prod(v.shape) for v in (*many.inputs, *many.outputs)))


def test_operands_that_nothing_reads_are_none() -> None:
    ((eqn, _, _),) = loops("unread")
    assert sorted(v.shape for v in eqn.inputs) == [(), (BATCH, 8), (8, 8)]
    assert BATCH in [rule_of(eqn).factors[f] for f in rule_of(eqn).splittable]


def cuts_of(name: str, which: int = 0) -> Rule:
    return rule_of(loops(name)[which][0])


def test_heads_and_hidden_units_are_one_factor() -> None:
    """Megatron's cut: queries, keys, values and the output by heads, the perceptron by hidden units; two sums."""
    rule = cuts_of("layers")
    (factor,) = [
        f for f in rule.splittable
        if all(any(f in dim for dim in rule.inputs[i]) for i, n in enumerate(rule.inputs) if len(n) > 2 and i > 0)
        and not any(f in dim for dim in rule.inputs[0])
    ]  # fmt: skip
    assert rule.factors[factor] == math.gcd(HEADS, HIDDEN)
    assert [s.times for s in rule.sums if s.factor == factor and s.within is None] == [LAYERS, LAYERS]
    assert rule.work({factor: 2}) < 0.6 * rule.work({})


def test_so_they_are_in_the_backward_loop() -> None:
    rule = cuts_of("layers", 1)
    adding = [f for f in rule.splittable if any(s.factor == f for s in rule.sums)]
    least = min(adding, key=lambda f: rule.work({f: 2}))
    assert rule.factors[least] == math.gcd(HEADS, HIDDEN)
    assert rule.work({least: 2}) < 0.6 * rule.work({})


def test_gradients_are_partial_sums_over_examples() -> None:
    """Over the batch nothing is summed in the loop: the weights' gradients come out as partial sums."""
    rule = cuts_of("layers", 1)
    batch = max(rule.splittable, key=lambda f: sum(any(f in dim for dim in dims) for dims in rule.inputs))
    assert not any(s.factor == batch for s in rule.sums)
    assert sum(rule.is_partial_sum(batch, k) for k in range(len(rule.outputs))) == len(LAYER_WEIGHTS)


@pytest.mark.parametrize("name", ["layers", "rematerialised"])
def test_what_is_kept_in_pieces_gives_the_whole(name: str) -> None:
    """Over both axes, beside the plain split of the same factor, and beside the factor that splits most besides."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), ("x", "y"))
    for eqn, operands, expected in loops(name):
        rule = rule_of(eqn)
        assert [isinstance(way, Gathering) for way in rule.gatherings] in ([True], [True, False])
        kept = Gathered(0)
        application = harness.Application(eqn, tuple(operands), tuple(expected))
        factor = rule.gatherings[0].factor
        other = min((f for f in rule.splittable if f != factor), key=lambda f: rule.work({f: 2}))
        assignments = [(kept, choice) for choice in (Split(factor), kept, Split(other))]
        assert set(assignments) < set(enumerate_assignments(rule, mesh, frozenset()))
        for assignment in assignments:
            for found, wanted in zip(
                harness.compute_assignment(application, rule, assignment, mesh), expected, strict=True
            ):
                np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5, err_msg=str(assignment))


@pytest.mark.parametrize("name", [*CASES, *FORWARD])
def test_what_is_between_sums_in_pieces_gives_the_whole(name: str) -> None:
    """Sequence parallelism over one axis, over both, and beside other factors and gatherings over the other."""
    mesh = Mesh((0, 1, 2, 3), (2, 2), ("x", "y"))
    tried = 0
    for eqn, operands, expected in loops(name):
        rule = rule_of(eqn)
        application = harness.Application(eqn, tuple(operands), tuple(expected))
        for k, way in enumerate(rule.gatherings):
            if not isinstance(way, Scattering):
                continue
            choice = Gathered(k)
            others: list[AxisChoice] = [REPLICATED, choice, *map(Gathered, range(k)), *map(Split, rule.splittable)]
            allowed = enumerate_assignments(rule, mesh, frozenset())
            assert (Split(way.factor), choice) not in allowed
            for other in others:
                assignment = other, choice
                if assignment not in allowed:
                    continue
                tried += 1
                sent = Counter(harness.collectives_of(application, rule, assignment, mesh))
                priced: Counter[Collective] = Counter()
                for collective, times in inner_collectives(rule, assignment, mesh):
                    priced[collective] += times
                assert sent == priced or name == "read in two ways"  # there is a sum for each way
                for found, wanted in zip(
                    harness.compute_assignment(application, rule, assignment, mesh), expected, strict=True
                ):
                    if not jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
                        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5, err_msg=str(assignment))
    assert tried or name not in ("layers", "beside a fence", "rematerialised", "flattened")


def test_sums_are_scattered_and_products_gather() -> None:
    """Megatron-LM's sequence parallelism: what is kept for the gradients of weights is gathered again."""
    mesh = Mesh((0, 1), (2,), ("x",))
    whole = 4 * BATCH * TIME * WIDTH
    for which, sums, gathers in ((0, 2, 2), (1, 2, 4)):
        rule = cuts_of("layers", which)
        ((k, way),) = [(k, way) for k, way in enumerate(rule.gatherings) if isinstance(way, Scattering)]
        sent: Counter[Collective] = Counter()
        for collective, times in inner_collectives(rule, (Gathered(k),), mesh):
            sent[collective] += times
        assert sent == {
            Collective("reduce_scatter", ("x",), whole): sums * LAYERS,
            Collective("all_gather", ("x",), whole): gathers * LAYERS,
        }
        # The plain cut sends as much in two sums, and leaves what is between them whole.
        plain = [*inner_collectives(rule, (Split(way.factor),), mesh)]
        assert plain == [(Collective("all_reduce", ("x",), whole), LAYERS)] * 2
        between = sum(kernel.flops for kernel in rule.kernels if Gathered(k) in kernel.held)
        cut: dict[int | Gathered, int] = {way.factor: 2}
        assert 0 < rule.work(cut) - rule.work({**cut, Gathered(k): 2}) == pytest.approx(between / 2)
        assert rule.temporaries({**cut, Gathered(k): 2}) <= rule.temporaries(cut)
        assert 0 in dict(way.operands) and 0 in dict(way.results)  # the carry


def test_parameters_are_what_is_kept_in_pieces() -> None:
    """The batch cut leaves the weights whole in each round; the biases are not worth a collective."""
    ws = {"w": normal(0, LAYERS, 64, 64), "b": normal(1, LAYERS, 1, 8)}
    x = normal(2, BATCH, 64)

    def layer(x: Any, w: Any) -> Any:
        scale = w["b"].mean().astype(x.dtype)
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ w.astype(x.dtype)) * scale)(x, w["w"]), None

    def loss(ws: Any, x: Any) -> Any:
        return lax.scan(layer, x.astype(jnp.bfloat16), ws)[0].sum().astype(jnp.float32)

    graph = trace(jax.grad(loss), (ws, x), {}, name="loss")
    forward, backward = [rule_of(e) for e in graph.equations if e.primitive.name == "scan"]
    gatherings = [[way for way in rule.gatherings if isinstance(way, Gathering)] for rule in (forward, backward)]
    # Gathered in 16 bits, summed in 32.
    assert [[s.nbytes for s in way.operands] for way in gatherings[0]] == [[2 * 64 * 64]]
    assert [[s.nbytes for s in way.operands] for way in gatherings[1]] == [[2 * 64 * 64]]
    assert [[s.nbytes for s in way.results] for way in gatherings[1]] == [[4 * 64 * 64]]
    mesh = Mesh((0, 1), (2,), ("x",))
    first = gatherings[0][0].operands[0].position
    assignment = (Gathered(0),)
    assert operand_shardings(forward, assignment, mesh)[first] == Sharding(((), ("x",), ()))
    assert list(inner_collectives(forward, assignment, mesh)) == [
        (Collective("all_gather", ("x",), 2 * 64 * 64), LAYERS)
    ]


def test_a_rule_registered_later_reaches_bodies_seen_before() -> None:
    kernel = Primitive("rows_kernel")
    kernel.def_abstract_eval(lambda x: jax.core.ShapedArray((x.shape[0], 1), x.dtype))

    def search(x: Any) -> Any:
        return lax.scan(lambda c, _: (c + kernel.bind(c), None), x, None, length=2)[0]

    def rule() -> Rule:
        graph = trace(search, (normal(0, 4, 6),), {}, name="f")
        return next(rule_of(e) for e in graph.equations if e.primitive.name == "scan")

    assert rule().replicates
    before = dict(table._REGISTERED)

    @table.register_sharding_rule("rows_kernel")
    def by_rows(_: Equation) -> Rule:
        return Rule((4, 6), (((0,), (1,)),), (((0,), ()),), whole=frozenset({1}))

    assert not rule().replicates
    table._REGISTERED.clear()
    table._REGISTERED.update(before)


def test_what_cannot_be_cut_is_replicated() -> None:
    """It runs whole, but for a wish for a sharding in it, which would name axes of another mesh."""
    mesh = jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    wish = jax.sharding.NamedSharding(mesh, PartitionSpec("z"))

    def sort_all(x: Any) -> Any:
        def once(c: Any, _: None) -> Any:
            return jnp.sort(lax.with_sharding_constraint(c.reshape(-1), wish)).reshape(c.shape), None

        return lax.scan(once, x, None, length=2)[0]

    x = normal(0, 4, 6)
    graph = trace(sort_all, (x,), {}, name="f")
    (eqn,) = [e for e in graph.equations if e.primitive.name == "scan"]
    rule = rule_of(eqn)
    assert rule.replicates
    assert not list(rule.splittable)

    def whole(x: Any) -> Any:
        return rule.emit(Together(rule, {}), eqn, [x])[0]

    assert "sharding_constraint" not in str(jax.make_jaxpr(whole)(x))
    np.testing.assert_array_equal(whole(x), np.sort(x.reshape(-1)).reshape(x.shape))


@pytest.mark.parametrize("parameters", [2, 16])
def test_gradients_that_a_loop_adds_up_are_carried_as_partial_sums_all_at_once(
    parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One propagation shows that none is summed in the loop, however many there are."""

    def run(self: Any, seeds: Any) -> Any:
        carrying.append(any(state is bodies.PARTIAL for state in seeds.values()))
        return propagate(self, seeds)

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in weights:
                x = x + jnp.tanh(x) * w
            return jnp.mean(x**2)

        def add(totals: list[jax.Array], x: jax.Array) -> Any:
            return [t + g for t, g in zip(totals, jax.grad(loss)(weights, x), strict=True)], None

        return lax.scan(add, [jnp.zeros_like(w) for w in weights], x)[0]

    carrying: list[bool] = []
    propagate = bodies.Propagation.run
    monkeypatch.setattr(bodies.Propagation, "run", run)
    weights, x = [jnp.ones(3)] * parameters, jnp.ones((4, 8, 3))
    graph = trace(step, (weights, x), {}, name="step")
    [scan] = [e for e in graph.equations if e.primitive.name == "scan"]
    rule = rule_of(scan)
    assert 1 <= sum(carrying) <= 2
    [examples] = [f for dims in rule.inputs for dim in dims for f in dim if rule.factors[f] == 8]
    assert all(rule.is_partial_sum(examples, k) for k in range(parameters))


def _by_slices(h: Any, x: Any, v: Any, w: Any, b: Any) -> Any:
    gate = jax.nn.sigmoid(x @ v[:, :8] + h @ w[:, :8] + b[:8])
    return gate * h + (1 - gate) * jnp.tanh(x @ v[:, 16:] + h @ w[:, 16:] + b[16:])


def _by_parts(h: Any, x: Any, v: Any, w: Any, b: Any) -> Any:
    """As Haiku's GRU does."""
    (of_gates, of_new), (gate_bias, bias) = jnp.split(w, [16], axis=1), jnp.split(b, [16])
    given, candidate = jnp.split(x @ v, [16], axis=1)
    update, reset = jnp.split(jax.nn.sigmoid(given + h @ of_gates + gate_bias), 2, axis=1)
    return (1 - update) * h + update * jnp.tanh(candidate + (reset * h) @ of_new + bias)


@pytest.mark.parametrize("cell", [_by_slices, _by_parts])
def test_the_gradient_of_a_weight_that_a_recurrent_loop_takes_parts_of_is_a_partial_sum(cell: Any) -> None:
    """Over examples nothing is summed in a round, though the parts' gradients become one of the weight's size there."""

    def step(v: Any, w: Any, b: Any, x: Any) -> Any:
        def loss_fn(v: Any, w: Any, b: Any) -> Any:
            _, hs = lax.scan(lambda h, x: (cell(h, x, v, w, b),) * 2, jnp.zeros((x.shape[1], 8)), x)
            return jnp.mean(hs[-1] ** 2)

        return jax.grad(loss_fn, argnums=(0, 1, 2))(v, w, b)

    args = jnp.ones((4, 24)), jnp.ones((8, 24)), jnp.ones(24), jnp.ones((5, 32, 4))
    *_, backward = (e for e in trace(step, args, {}, name="step").equations if e.primitive.name == "scan")
    rule = rule_of(backward)
    [examples] = {f for dims in rule.inputs for dim in dims for f in dim if rule.factors[f] == 32 and len(dims) > 1}
    assert not any(each.factor == examples and each.within is None for each in rule.sums)
    gradients = [k for k, v in enumerate(backward.outputs) if v.shape in ((4, 24), (8, 24), (24,))]
    assert len(gradients) == 3
    assert all(rule.is_partial_sum(examples, k) for k in gradients)
