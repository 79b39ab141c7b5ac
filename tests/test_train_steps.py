"""The ways in which users write a train step, unmodified: the same numbers as `jax.jit` after two steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanError

Step = Callable[[Any, Any], tuple[Any, Any]]
FEATURES, HIDDEN, CLASSES, BATCH, TIME = 16, 32, 8, 32, 5


def parameters() -> dict[str, jax.Array]:
    w, v = jax.random.split(jax.random.key(0))
    return {
        "w": 0.2 * jax.random.normal(w, (FEATURES, HIDDEN)),
        "b": jnp.zeros(HIDDEN),
        "v": 0.2 * jax.random.normal(v, (HIDDEN, CLASSES)),
    }


def examples() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(BATCH, FEATURES)).astype(np.float32),
        "y": random.normal(size=(BATCH, CLASSES)).astype(np.float32),
    }


def network(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def squared_error(p: Any, batch: Any) -> Any:
    return jnp.mean((network(p, batch["x"]) - batch["y"]) ** 2)


def descend(p: Any, g: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda a, b: a - rate * b, p, g)


def accumulating_optimizer() -> tuple[Step, Any]:
    """Updates every second step only: `lax.cond` in the update."""
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(squared_error)(state["params"], batch)
        updates, opt = optimizer.update(g, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": parameters(), "opt": optimizer.init(parameters())}


def accumulation_by_hand() -> tuple[Step, Any]:
    """A scan over slices of the batch."""

    def step(p: Any, batch: Any) -> Any:
        slices = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)

        def add(total: Any, piece: Any) -> Any:
            loss, g = jax.value_and_grad(squared_error)(p, piece)
            return (total[0] + loss, jax.tree.map(jnp.add, total[1], g)), None

        (loss, g), _ = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, p)), slices)
        return descend(p, g, 0.1 / 4), loss / 4

    return step, parameters()


def recurrent() -> tuple[Step, Any]:
    """An LSTM by `scan` over time, the batch in the second dimension."""
    w, u, o = jax.random.split(jax.random.key(1), 3)
    start = {
        "w": 0.2 * jax.random.normal(w, (FEATURES, 4 * HIDDEN)),
        "u": 0.2 * jax.random.normal(u, (HIDDEN, 4 * HIDDEN)),
        "o": 0.2 * jax.random.normal(o, (HIDDEN, CLASSES)),
    }

    def loss(p: Any, batch: Any) -> Any:
        def cell(state: Any, x: Any) -> Any:
            h, c = state
            i, f, o, z = jnp.split(x @ p["w"] + h @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(z)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), h

        zero = jnp.zeros((batch["x"].shape[0], HIDDEN))
        series = jnp.stack([batch["x"] * t for t in range(TIME)])
        (h, _), hs = jax.lax.scan(cell, (zero, zero), series)
        return jnp.mean(((h + hs.mean(0)) @ p["o"] - batch["y"]) ** 2)

    def step(p: Any, batch: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, batch)
        return descend(p, g), value

    return step, start


def vjp_by_hand() -> tuple[Step, Any]:
    def step(p: Any, batch: Any) -> Any:
        found, pullback = jax.vjp(lambda p: network(p, batch["x"]), p)
        rest = found - batch["y"]
        (g,) = pullback(2 * rest / rest.size)
        return descend(p, g), jnp.mean(rest**2)

    return step, parameters()


def clipping_each_example() -> tuple[Step, Any]:
    def step(p: Any, batch: Any) -> Any:
        def one(p: Any, x: Any, y: Any) -> Any:
            return jnp.mean((network(p, x) - y) ** 2)

        gs = jax.vmap(jax.grad(one), (None, 0, 0))(p, batch["x"], batch["y"])
        norms = jnp.sqrt(sum((g**2).reshape(BATCH, -1).sum(1) for g in jax.tree.leaves(gs)))
        scale = jnp.minimum(1, 0.5 / norms)
        g = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / scale.size, gs)
        return descend(p, g), norms.mean()

    return step, parameters()


def clipping_each_sequence() -> tuple[Step, Any]:
    """Of convolutions: `vmap` makes the examples groups of features."""

    def network(p: Any, x: Any) -> Any:
        x = x.reshape(1, 8, FEATURES // 8)
        for name, groups in (("wide", 1), ("depthwise", 8)):
            x = jax.lax.conv_general_dilated(
                x, p[name], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
            )
        return jnp.tanh(x).mean(1)[0]

    def step(p: Any, batch: Any) -> Any:
        gs = jax.vmap(jax.grad(lambda p, x, y: jnp.mean((network(p, x) - y) ** 2)), (None, 0, 0))(
            p, batch["x"], batch["y"]
        )
        norms = jnp.sqrt(sum((g**2).reshape(BATCH, -1).sum(1) for g in jax.tree.leaves(gs)))
        g = jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 0.5 / norms), g, 1) / BATCH, gs)
        return descend(p, g), norms.mean()

    keys = jax.random.split(jax.random.key(3))
    shapes = {"wide": (3, FEATURES // 8, 8), "depthwise": (3, 1, 8)}
    return step, {name: jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}


def gradient_penalty() -> tuple[Step, Any]:
    def loss(p: Any, batch: Any) -> Any:
        slopes = jax.vmap(jax.grad(lambda x: network(p, x).sum()))(batch["x"])
        return squared_error(p, batch) + 0.1 * jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    def step(p: Any, batch: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, batch)
        return descend(p, g), value

    return step, parameters()


def frozen_and_averaged() -> tuple[Step, Any]:
    """One matrix is frozen, the others have a moving average; metrics in a dict, `None` in the state."""
    labels = {"w": "frozen", "v": "trained", "b": "trained"}
    optimizer = optax.multi_transform({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(squared_error)(state["params"], batch)
        updates, opt = optimizer.update(g, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["average"], params)
        return {"params": params, "opt": opt, "average": average, "extra": None}, {
            "loss": loss,
            "norm": (g["v"] ** 2).sum(),
        }

    p = parameters()
    return step, {"params": p, "opt": optimizer.init(p), "average": p, "extra": None}


def two_losses() -> tuple[Step, Any]:
    """Two optimizers, as for a generator and its critic."""
    first, second = optax.sgd(0.1), optax.adam(1e-2)

    def step(state: Any, batch: Any) -> Any:
        loss_a, g_a = jax.value_and_grad(squared_error)(state["a"], batch)
        made = jax.lax.stop_gradient(network(state["a"], batch["x"]))
        loss_b, g_b = jax.value_and_grad(lambda p: jnp.mean((network(p, batch["x"]) - made) ** 2))(state["b"])
        up_a, opt_a = first.update(g_a, state["opt_a"], state["a"])
        up_b, opt_b = second.update(g_b, state["opt_b"], state["b"])
        a, b = optax.apply_updates(state["a"], up_a), optax.apply_updates(state["b"], up_b)
        return {"a": a, "b": b, "opt_a": opt_a, "opt_b": opt_b}, (loss_a, loss_b)

    p = parameters()
    q = jax.tree.map(lambda x: x * 0.5, p)
    return step, {"a": p, "b": q, "opt_a": first.init(p), "opt_b": second.init(q)}


def dynamic_loss_scale() -> tuple[Step, Any]:
    """float16, float32 master weights; an update only where all gradients are finite."""

    def step(state: Any, batch: Any) -> Any:
        half = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float16))

        def loss(p: Any) -> Any:
            return squared_error(half(p), half(batch)).astype(jnp.float32) * state["scale"]

        value, g = jax.value_and_grad(loss)(state["params"])
        g = jax.tree.map(lambda x: x / state["scale"], g)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(g)]))
        params = jax.lax.cond(finite, descend, lambda p, g: p, state["params"], g)
        scale = jnp.where(finite, state["scale"], state["scale"] / 2)
        return {"params": params, "scale": scale, "count": state["count"] + 1}, value

    return step, {"params": parameters(), "scale": jnp.float32(1024), "count": jnp.int32(0)}


def constrained_loop() -> tuple[Step, Any]:
    """A user's own sharding constraint in a loop over layers: a wish, which the plan overrides."""
    mesh = jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    wish = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "z"))

    def loss(p: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ jax.lax.with_sharding_constraint(w, wish)), None

        h, _ = jax.lax.scan(layer, batch["x"], p["layers"])
        return jnp.mean((h @ p["out"] - batch["y"]) ** 2)

    def step(p: Any, batch: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, batch)
        return descend(p, g), value

    layers, out = jax.random.split(jax.random.key(2))
    shape = (3, FEATURES, FEATURES)
    return step, {
        "layers": 0.2 * jax.random.normal(layers, shape),
        "out": 0.2 * jax.random.normal(out, (FEATURES, CLASSES)),
    }


STEPS = [
    accumulating_optimizer, accumulation_by_hand, recurrent, vjp_by_hand, clipping_each_example, clipping_each_sequence,
    gradient_penalty,
    frozen_and_averaged, two_losses, dynamic_loss_scale, constrained_loop,
]  # fmt: skip
METHODS: dict[str, Any] = {
    "data_parallel": recipes.data_parallel(),
    "two_microbatches": recipes.data_parallel(2),
    "pipeline": recipes.gpipe(2, 2),
    "auto": "auto",
}
LOOPS = (accumulation_by_hand, recurrent)  # a loop lies in one stage


def compiled_by_defaults(at: int) -> str:
    """The method by which a step is compiled as users do, too: either of two in turn, if it has both."""
    return "two_microbatches" if at % 2 or STEPS[at] in LOOPS else "pipeline"


CASES = [
    pytest.param(
        make, method, id=f"{make.__name__}-{method}",
        marks=[pytest.mark.xla_defaults] * (method == compiled_by_defaults(at)),
    )
    for at, make in enumerate(STEPS)
    for method in METHODS
]  # fmt: skip


@functools.cache
def expected(make: Callable[[], tuple[Step, Any]]) -> Any:
    step, state = make()
    for _ in range(2):
        state, metrics = jax.jit(step)(state, examples())
    return state, metrics


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "method"), CASES)
def test_same_as_one_device(make: Callable[[], tuple[Step, Any]], method: str) -> None:
    step, state = make()
    parallel = autopar.parallelize(step, method=METHODS[method])
    if make in LOOPS and method == "pipeline":
        with pytest.raises(PlanError, match="the forward pass of step has only "):
            parallel.plan(state, examples())
        return
    for _ in range(2):
        state, metrics = parallel(state, examples())
    tolerance = 2e-3 if make is dynamic_loss_scale else 2e-5  # float16 has three digits, and sums another order
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        autopar.gather((state, metrics)), expected(make),
    )  # fmt: skip


def test_accumulation_by_hand_is_shared_out() -> None:
    """The batch is reshaped to (4, 8) and looped over: it is cut along the 8."""
    step, state = accumulation_by_hand()

    def flops(**how: Any) -> float:
        executable = autopar.parallelize(step, **how).compile(state, examples())
        return float(sum(program.cost_analysis()["flops"] for program in executable._worker.programs))

    assert flops(method=recipes.data_parallel()) < 0.25 * flops(devices=jax.devices()[:1])


def printing() -> tuple[Step, Any]:
    """Whole values, whatever they are cut into: of the batch, of sums over it, of the state before and after."""

    def step(state: Any, batch: Any) -> Any:
        jax.debug.print("step {}", state["step"], ordered=True)

        @jax.checkpoint
        def loss(p: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ p["w"] + p["b"])
            jax.debug.print("hidden {:.4f} of {n}", hidden[BATCH - 1, 0], n=hidden.size)
            value = jnp.mean((hidden @ p["v"] - batch["y"]) ** 2)
            jax.debug.print("loss {:.4f}", value)
            return value

        value, g = jax.value_and_grad(loss)(state["params"])
        jax.debug.callback(lambda x: print(f"norm {np.linalg.norm(x):.3f} of {x.shape}"), batch["x"])
        params = descend(state["params"], g)
        jax.debug.print("bias {x}", x=(params["b"].sum() * 1000).astype(int), ordered=True)
        jax.debug.print("done")
        return {"params": params, "step": state["step"] + 1}, value

    return step, {"params": parameters(), "step": jnp.int32(0)}


@pytest.mark.parametrize("method", METHODS)
def test_printing_inside(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    step, start = printing()

    def printed(step: Step) -> list[str]:
        state = jax.tree.map(jnp.array, start)
        capfd.readouterr()
        for _ in range(2):
            state, _ = step(state, examples())
        jax.effects_barrier()
        return sorted(capfd.readouterr().out.splitlines())

    wanted = printed(jax.jit(step))
    assert len(wanted) == 2 * 8  # in two steps; what is rematerialised prints twice
    assert printed(autopar.parallelize(step, method=METHODS[method])) == wanted


def test_loops_show_what_they_did_round_by_round() -> None:
    """In loops over layers, in loops in them, forward and backward, in branches of `jit`; with values of any kind."""
    seen: list[Any] = []

    def show(tag: str, *values: Any) -> None:
        jax.debug.callback(lambda *xs: seen.append((tag, *(round(float(x), 3) for x in xs))), *values)

    @jax.jit
    def inner(h: Any, k: Any) -> tuple[Any, None]:
        show("inner", k, h.sum())
        return h * 1.01, None

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        h = jnp.tanh(h @ w)
        show("layer", h.mean(), 3)
        return jax.lax.scan(inner, h, jnp.arange(2))

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            h, _ = jax.lax.scan(layer, batch["x"], p)
            return jnp.mean(h**2)

        value, g = jax.value_and_grad(loss)(state)
        show("loss", value)
        return state - 0.1 * g, value

    stack, x = 0.3 * jax.random.normal(jax.random.key(0), (4, 8, 8)), jax.random.normal(jax.random.key(1), (16, 8))
    jax.jit(step)(stack, {"x": x})
    jax.effects_barrier()
    wanted, seen[:] = list(seen), []
    # Forward and backward 4 layers with 2 rounds each.
    assert len(wanted) == 2 * 4 * 3 + 1
    for method in (autopar.recipes.data_parallel(), autopar.recipes.gpipe(2, 2)):
        autopar.parallelize(step, method=method)(jnp.copy(stack), {"x": x})
        jax.effects_barrier()
        assert sorted(seen) == sorted(wanted)
        assert [tag for tag, *_ in seen] == (["layer", "inner", "inner"] * 4) * 2 + ["loss"]
        assert [k for tag, k, *_ in seen[:12] if tag == "inner"] == [0, 1] * 4
        seen.clear()


def test_prints_come_in_the_order_of_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(squared_error)(state, batch)
        jax.debug.print("literal {} start {}", 3, state["w"].shape[0])
        jax.debug.print("loss {}", loss)
        for number in range(4):
            jax.debug.print("then {} {}", number, batch["x"][number, 0])
        return descend(state, g), loss

    autopar.parallelize(step, method=METHODS["data_parallel"])(parameters(), examples())
    jax.effects_barrier()
    words = [" ".join(line.split()[:2]) for line in capfd.readouterr().out.splitlines()]
    assert [w.split()[0] for w in words] == ["literal", "loss", *["then"] * 4]
    assert words[2:] == [f"then {n}" for n in range(4)]


def test_what_a_step_replaces_can_be_returned_as_well() -> None:
    """The old value, though its buffer is overwritten."""

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(squared_error)(state, batch)
        return descend(state, g), {"loss": loss, "before": state["w"]}

    parallel = autopar.parallelize(step)
    state, _ = parallel(parameters(), examples())
    before = np.asarray(state["w"])
    state, metrics = parallel(state, examples())
    np.testing.assert_array_equal(metrics["before"], before)
    assert np.any(np.asarray(state["w"]) != before)
