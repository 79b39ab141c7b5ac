"""From a Python function to a graph: names, phases, state, inlining."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.graph import Graph, Phase
from autopar.tracing.trace import leaf_specs, matching_leaves, name_of, trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def carried_paths(graph: Graph) -> dict[str, str]:
    """Output path -> path of the input that it replaces."""
    return {graph.output_paths[k]: graph.input_paths[i] for k, i in graph.carried.items()}


class State(NamedTuple):
    params: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Instants:
    mean: Any
    none: Any = None


def test_paths_and_state_of_any_pytree() -> None:
    def fun(state: State, batch: Any, *, rate: Any) -> Any:
        return {"loss": batch.sum(), "state": State(jax.tree.map(lambda x: x * rate, state.params), state.step + 1)}

    state = State(({"w": f32(2)}, Instants(f32(2)), ()), jax.ShapeDtypeStruct((), jnp.int32))
    graph = trace(fun, (state, f32(4)), {"rate": f32()}, name="fun")
    assert graph.input_paths == ("state.params[0]['w']", "state.params[1].mean", "state.step", "batch", "rate")
    assert carried_paths(graph) == {
        "output['state'].params[0]['w']": "state.params[0]['w']",
        "output['state'].params[1].mean": "state.params[1].mean",
        "output['state'].step": "state.step",
    }


def test_parts_of_the_state_may_come_out_in_other_places() -> None:
    """Parameters and optimizer state as arguments and results of their own; a metric shaped like a weight is none."""

    def fun(params: Any, opt: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.tanh, params), {"m": opt["m"] + 1}, batch.mean(), jnp.ones(2)

    graph = trace(fun, ({"w": f32(2), "b": f32(3)}, {"m": f32(2)}, f32(4)), {}, name="fun")
    assert carried_paths(graph) == {
        "output[0]['b']": "params['b']",
        "output[0]['w']": "params['w']",
        "output[1]['m']": "opt['m']",
    }


def test_a_bare_array_is_state_only_in_its_place() -> None:
    graph = trace(lambda w, x: (w * x.mean(), x * 2), (f32(4), f32(4)), {}, name="fun")
    assert carried_paths(graph) == {"output[0]": "w", "output[1]": "x"}
    graph = trace(lambda w, x: (x.mean(), w * x), (f32(4), f32(4)), {}, name="fun")
    assert carried_paths(graph) == {"output[1]": "x"}
    graph = trace(lambda w, x: w * x.mean(), (f32(4), f32(4)), {}, name="fun")
    assert carried_paths(graph) == {"output": "w"}


@dataclasses.dataclass(frozen=True)
class CountedSpec:
    """Of a leaf, that notes how often one is compared or hashed."""

    number: int
    looks: list[int] = dataclasses.field(compare=False)

    def __eq__(self, other: Any) -> bool:
        self.looks[0] += 1
        return isinstance(other, CountedSpec) and self.number == other.number

    def __hash__(self) -> int:
        self.looks[0] += 1
        return hash(self.number)


@pytest.mark.parametrize("shared", [True, False], ids=["one shape", "many shapes"])
@pytest.mark.parametrize("kind", ["list and dict", "layers", "layers that differ"])
def test_matching_is_linear_in_the_leaves(kind: str, shared: bool) -> None:
    """Twice the leaves are twice the looks, whether structures agree or not."""

    def looks(n: int) -> int:
        layer = {"w": 0, "b": 0}
        ins, outs = {
            "list and dict": ([0] * n, {f"{i:05}": 0 for i in range(n)}),
            "layers": ([layer] * (n // 2), (layer, [layer] * (n // 2 - 1))),
            "layers that differ": ([layer] * (n // 2), [{"w": 0, "c": 0}] * (n // 2)),
        }[kind]
        found = [0]
        specs: Any = [CountedSpec(0 if shared else i, found) for i in range(n)]
        matches = matching_leaves(jax.tree.structure(((ins,), {})), specs, jax.tree.structure(outs), specs)
        assert len(matches) == (n if kind == "layers" else 0)
        return found[0]

    assert looks(1024) <= 2.1 * looks(512) <= 20 * 1024


def test_phases() -> None:
    """tanh forwards, its derivative's product backwards, the update and the metric neither."""

    def fun(w: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - g, jnp.cos(loss)

    graph = trace(fun, (f32(3), f32(4, 3)), {}, name="fun")
    phases = {(e.primitive.name, e.phase) for e in graph.equations}
    assert {("tanh", Phase.FORWARD), ("dot_general", Phase.FORWARD), ("dot_general", Phase.BACKWARD)} <= phases
    assert {("sub", Phase.UPDATE), ("cos", Phase.UPDATE)} <= phases
    assert ("cos", Phase.FORWARD) not in phases


def test_calls_are_inlined_and_what_nobody_needs_is_gone() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.sin(x), jnp.cos(x)

    @jax.custom_jvp
    def custom(x: Any) -> Any:
        return jnp.exp(x)

    custom.defjvp(lambda xs, ts: (custom(*xs), ts[0]))
    graph = trace(lambda x: custom(jax.checkpoint(lambda y: inner(y)[0])(x)), (f32(2),), {}, name="fun")
    assert [e.primitive.name for e in graph.equations] == ["sin", "exp"]


def test_rematerialisation_is_fenced() -> None:
    """One fence; behind it the forward pass once more."""

    def fun(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x * w)))(w).sum())(w)

    names = [e.primitive.name for e in trace(fun, (f32(3), f32(4, 3)), {}, name="fun").equations]
    assert names.count("optimization_barrier") == 1
    assert "cos" in names[names.index("optimization_barrier") :]


def test_a_condition_that_only_chooses_is_a_selection() -> None:
    """As in `optax.periodic_update`: each leaf can then be split in its own way."""

    def fun(p: Any, q: Any, n: Any) -> Any:
        return jax.lax.cond(n > 0, lambda: (p, 1.0), lambda: (q, 0.0))

    graph = trace(fun, (f32(3), f32(3), jax.ShapeDtypeStruct((), jnp.int32)), {}, name="fun")
    names = [e.primitive.name for e in graph.equations]
    assert names.count("select_n") == 2 and "cond" not in names


@pytest.mark.parametrize(("index", "taken"), [(0, "sin"), (1, "cos"), (2, "exp"), (7, "exp"), (-3, "sin")])
def test_a_condition_with_a_constant_index_is_the_branch_it_takes(index: int, taken: str) -> None:
    """Computed from constants, too: what a library decides by flags of its own."""

    def fun(x: Any) -> Any:
        return jax.lax.switch(jnp.int32(index) + 0, [jnp.sin, jnp.cos, jnp.exp], x)

    names = [e.primitive.name for e in trace(fun, (f32(3),), {}, name="fun").equations]
    assert names == [taken]


def test_multi_steps_that_skip_nothing_have_no_condition() -> None:
    """`optax.MultiSteps` puts all that it does into a condition on whether to skip a step, by default on False."""
    optimizer = optax.MultiSteps(optax.adam(1e-3), 4)
    w = {"a": f32(4, 4), "b": f32(4)}

    def fun(w: Any, state: Any, g: Any) -> Any:
        return optimizer.update(g, state, w)

    graph = trace(fun, (w, jax.eval_shape(optimizer.init, w), w), {}, name="fun")
    assert "cond" not in {e.primitive.name for e in graph.equations}


def test_collectives_under_vmap_are_reductions() -> None:
    """As in a step that was written for `pmap`."""

    def fun(x: Any) -> Any:
        return jax.vmap(lambda x: (jax.lax.pmean(x, "i"), jax.lax.pmax(x, "i")), axis_name="i", out_axes=(None, None))(
            x
        )

    names = [e.primitive.name for e in trace(fun, (f32(4, 3),), {}, name="fun").equations]
    assert names == ["reduce_sum", "div", "reduce_max"]


def test_a_reshape_of_permuted_dimensions_is_a_transposition_before() -> None:
    graph = trace(lambda x: jax.lax.reshape(x, (3, 8), (1, 0, 2)), (f32(2, 3, 4),), {}, name="fun")
    assert [e.primitive.name for e in graph.equations] == ["transpose", "reshape"]


def test_paths_of_variable_arguments() -> None:
    graph = trace(lambda p, *rest, scale: (p, rest, scale), (f32(1), f32(2), f32(3)), {"scale": f32()}, name="fun")
    assert graph.input_paths == ("p", "rest[0]", "rest[1]", "scale")


def test_sources_are_the_users_lines() -> None:
    graph = trace(lambda x: jnp.sinh(x), (f32(2),), {}, name="fun")
    (eqn,) = graph.equations
    assert "test_trace.py:" in eqn.source


def test_sources_name_the_users_line_before_that_of_a_package() -> None:
    (*_, eqn) = trace(lambda x: optax.huber_loss(x), (f32(2),), {}, name="fun").equations
    assert re.match(r".*test_trace\.py:\d+:\d+ \(.*<lambda>\), in .*optax/losses/_regression\.py:\d+", eqn.source)


def test_fingerprints() -> None:
    """Equal for the same program, other for other constants, shapes and parameters."""

    def make(fun: Any, n: int = 4) -> str:
        return trace(fun, (f32(n, 2),), {}, name="fun").fingerprint

    one = make(lambda x: jnp.sum(x * 2.0, 0))
    assert one == make(lambda y: jnp.sum(y * 2.0, 0))
    others = {
        make(lambda x: jnp.sum(x * 3.0, 0)),
        make(lambda x: jnp.sum(x * 2.0, 0), 8),
        make(lambda x: jnp.sum(x * 2.0, 1)),
    }
    assert len({one, *others}) == 4


def test_captured_arrays_are_constants() -> None:
    table = jnp.arange(3.0)
    graph = trace(lambda x: x + table, (f32(3),), {}, name="fun")
    ((value, constant),) = graph.constants.items()
    assert value.shape == (3,) and np.array_equal(constant, table)


@pytest.mark.parametrize(
    ("leaf", "spec"),
    [
        (np.zeros((2, 3), np.int64), ((2, 3), jnp.int32)),  # as jax sees it without 64 bits
        (jnp.zeros(4, jnp.bfloat16), ((4,), jnp.bfloat16)),
        (f32(5), ((5,), jnp.float32)),
        (1.5, ((), jnp.float32)),
        (3, ((), jnp.int32)),
        ("text", ((), str)),
    ],
)
def test_leaf_specs(leaf: Any, spec: Any) -> None:
    ((shape, dtype),) = leaf_specs([leaf])
    assert (shape, dtype) == spec


class Trainer:
    def step(self, x: Any) -> Any:
        return x

    def __call__(self, x: Any) -> Any:
        return x


def a_step(x: Any, rate: float = 0.1) -> Any:
    return rate * x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (a_step, "a_step"),
        (functools.partial(a_step, rate=0.5), "a_step"),
        (functools.partial(functools.partial(a_step), rate=0.5), "a_step"),
        (jax.jit(functools.partial(a_step, rate=0.5)), "a_step"),
        (functools.partial(jax.jit(a_step, static_argnames="rate"), rate=0.5), "a_step"),
        (eqx.filter_jit(functools.partial(a_step, rate=0.5)), "a_step"),
        (jax.checkpoint(functools.partial(a_step, rate=0.5)), "a_step"),
        (Trainer().step, "step"),
        (functools.partial(Trainer().step), "step"),
        (Trainer(), "Trainer"),
        (functools.partial(Trainer()), "Trainer"),
        (lambda x: x, "<lambda>"),
    ],
)
def test_a_step_is_called_by_its_own_name(function: Any, name: str) -> None:
    assert name_of(function) == name
    assert autopar.parallelize(function, batch_axes=None).trace(jnp.ones(4)).graph.name == name
