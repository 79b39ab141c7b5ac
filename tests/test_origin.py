"""Where a NaN arises: one is planted at a random operator, in a random example, and its line has to be named."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
from typing import Any

import click.testing
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.cli import arguments
from autopar.cli.main import main
from autopar.compiling.origin import Computed, origin_in, origin_of
from autopar.errors import NotFiniteError, PlanError
from autopar.executable import Executable
from autopar.runtime.checked import CheckedWorker
from tests.passes.test_last_microbatch import hiding
from tests.planned import analyse, cluster_of, plan_analysis

EXAMPLES, WIDTH = 16, 8
METHODS = {
    "within one stage": recipes.zero(3),
    "two stages": recipes.gpipe(2, 4),
    "interleaved": recipes.pipeline([(1, (2,)), (1, (2,))] * 2, 4, "interleaved"),
    "without a bubble": recipes.pipeline([(2, (4,)), (2, (4,))], 4, "zero-bubble"),
    "microbatches of one stage": recipes.megatron(4, 2, 1, 4),
}


@jax.custom_vjp
def odd(x: Any, is_bad: Any) -> Any:
    """The same, with a gradient that is no number where it is bad: JAX says of that where this is called."""
    return x


def _odd_forward(x: Any, is_bad: Any) -> Any:
    return x, is_bad


def _odd_backward(is_bad: Any, g: Any) -> Any:
    return g * jnp.sqrt(1.0 - 2.0 * is_bad), None


odd.defvjp(_odd_forward, _odd_backward)


def loss(params: Any, x: Any, site: Any) -> Any:
    def bad(number: int) -> Any:
        return (site == number).astype(jnp.float32)[:, None]

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        h = jnp.tanh(h @ w)
        scale = jax.lax.cond(h.size > 0, lambda b: jnp.log(1.0 - 2.0 * b), jnp.negative, bad(5))  # site 5
        return h + scale * jnp.arcsin(1.0 + bad(4) - 0.5), None  # site 4

    masked = jnp.where(bad(1) > 2, jnp.nan, x)  # never
    h = jnp.tanh(masked @ params["first"])
    h = h / (1.0 - bad(0)) * (1.0 - bad(0))  # site 0
    h = jnp.tanh(h @ params["second"])
    h = h + jnp.log(1.0 - 2.0 * bad(1))  # site 1
    h, _ = jax.lax.scan(layer, h, params["stack"])
    h = jnp.tanh(h @ params["third"])
    h = h + jnp.exp(800.0 * bad(2)) - jnp.exp(800.0 * bad(2))  # site 2
    h = odd(h, bad(7))  # site 7
    h = jnp.tanh(h @ params["fourth"])
    root = jnp.sqrt(jnp.square(h) * (1.0 - bad(3)))  # site 3
    return jnp.mean(jnp.square(root + h))


def train_step(state: Any, x: Any, site: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(state["params"], x, site)
    is_bad = jnp.max(site) == 6
    rate = jnp.power(0.1 - is_bad, 1.5)  # site 6
    params = jax.tree.map(lambda p, g: p - rate * g, state["params"], gradients)
    return {"params": params}, value


def state() -> Any:
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        name: jax.random.normal(key, (WIDTH, WIDTH)) / 3
        for name, key in zip(("first", "second", "third", "fourth"), keys, strict=False)
    }
    return {"params": {**params, "stack": jax.random.normal(keys[4], (3, WIDTH, WIDTH)) / 3}}


def examples(site: int | None, at: int) -> tuple[Any, Any]:
    """A batch with what happens at a site in one example."""
    x = np.random.default_rng(at).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    sites = np.full(EXAMPLES, -1, np.int32)
    if site is not None:
        sites[at] = site
    return x, sites


@functools.cache
def executable(method: str) -> Executable:
    step = autopar.parallelize(
        train_step, batch_axes=(None, 0, 0), method=METHODS[method],
        devices=jax.devices()[: 4 if method == "interleaved" else 8],
    )  # fmt: skip
    return step.compile(state(), *examples(None, 0))


@functools.cache
def line_of(site: int) -> int:
    """The number of the line that is marked so."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    return next(k for k, line in enumerate(lines, 1) if line.endswith(f"# site {site}"))


@pytest.mark.parametrize("trial", range(50))
def test_the_line_is_named(trial: int) -> None:
    random = np.random.default_rng(trial)
    method = [*METHODS][trial % len(METHODS)]
    site, at = int(random.integers(8)), int(random.integers(EXAMPLES))
    step = executable(method)
    with jax.debug_nans(True), pytest.raises(NotFiniteError) as caught:
        step(state(), *examples(site, at))
    found = re.search(r"It arises in (\S+) at \S*test_origin.py:(\d+):", str(caught.value))
    assert found is not None and int(found[2]) == line_of(site), (method, site, str(caught.value))
    count = step.plan.num_microbatches
    if count > 1 and site != 6:
        assert f"microbatch {at * count // EXAMPLES} of {count}" in str(caught.value)


def test_nans_that_are_there_before_are_said_to_be() -> None:
    before = state()
    before["params"]["third"] = np.full((WIDTH, WIDTH), np.nan, np.float32)
    with jax.debug_nans(True), pytest.raises(NotFiniteError, match=r"called with such in state\['params'\]\['third'\]"):
        executable("two stages")(before, *examples(None, 0))


def test_infinities_of_masks_are_no_origins() -> None:
    def step(w: Any, x: Any) -> tuple[Any, Any]:
        scores = jnp.where(jnp.arange(WIDTH) < 4, x @ w, -jnp.inf)
        total = jnp.sum(jax.nn.softmax(scores) * 2.0)
        return w, jnp.exp(total * 10.0)

    parallel = autopar.parallelize(step, batch_axes=(None, 0), method=recipes.data_parallel())
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((EXAMPLES, WIDTH))
    with pytest.raises(NotFiniteError, match=r"\(inf\) .* It arises in exp at \S*test_origin.py:\d+"):
        autopar.debug(parallel)(w, x)
    assert np.isinf(autopar.debug(parallel, infs=False)(w, x)[1])


TARGET = """
import jax
import jax.numpy as jnp

import autopar


def train_step(params, batch):
    def loss(w):
        return jnp.mean(jnp.log(batch["x"] @ w))  # here

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)), loss(params)


step = autopar.parallelize(train_step)


def train():
    return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32), {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)})
"""


def test_a_bad_step_is_saved_and_computed_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved_step.py").write_text(TARGET)
    line = next(k for k, text in enumerate(TARGET.splitlines(), 1) if text.endswith("# here"))
    namespace = arguments.load_call("saved_step.py:train")
    assert isinstance(namespace.step, autopar.Parallelized)
    step = autopar.debug(namespace.step, save_to=tmp_path / "bad")
    assert step.__name__ == "train_step" and step.cluster == namespace.step.cluster
    with pytest.raises(PlanError, match=r"^debug\(<function train_step .*\): make it a step by autopar.parallelize"):
        autopar.debug(namespace.step._function.fun)  # type: ignore[arg-type]
    w, batch = jnp.ones((8, 8)), {"x": jnp.ones((16, 8))}
    for _ in range(2):
        w, _ = step(w, batch)
    assert not (tmp_path / "bad").exists()
    batch["x"] = batch["x"].at[3].set(-1.0)
    with pytest.raises(NotFiniteError, match=r"It arises in log .* `autopar replay TARGET \S*bad` computes"):
        step(w, batch)

    invoked = click.testing.CliRunner().invoke(main, ["replay", "saved_step.py:train", "bad"])
    assert invoked.exit_code == 1, invoked.output
    assert re.search(rf"invalid value \(nan\) arises in log at \S*saved_step.py:{line}:", invoked.stdout)
    (tmp_path / "empty").mkdir()
    invoked = click.testing.CliRunner().invoke(main, ["replay", "saved_step.py:train", "empty"])
    assert invoked.exit_code == 2 and "holds no arguments of a call" in invoked.stderr


def test_what_is_finite_on_one_device_is_said_to_be() -> None:
    step = autopar.parallelize(train_step, batch_axes=(None, 0, 0))
    graph = step.trace(state(), *examples(None, 0)).graph
    leaves = jax.tree.leaves((state(), *examples(None, 0)))
    assert origin_in(graph, leaves, "nan") == Computed(False, False)
    leaves[-2][3] = np.nan
    found = origin_in(graph, leaves, "nan")
    assert found.is_found and found.is_given


def test_functions_with_gradients_of_their_own_in_a_body() -> None:
    """Not differentiated, they are still there as such."""

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        def layer(h: Any, _: Any) -> tuple[Any, None]:
            return jnp.log(jax.nn.relu(h) - 1.0), None  # here

        return w, jnp.mean(jax.lax.scan(layer, x @ w, length=3)[0])

    parallel = autopar.debug(autopar.parallelize(step, batch_axes=(None, 0), method=recipes.data_parallel()))
    lines = inspect.getsource(test_functions_with_gradients_of_their_own_in_a_body).splitlines()
    first = inspect.getsourcelines(test_functions_with_gradients_of_their_own_in_a_body)[1]
    line = first + next(k for k, text in enumerate(lines) if text.endswith("# here"))
    with pytest.raises(NotFiniteError, match=rf"It arises in log at \S*test_origin.py:{line}:"):
        parallel(jnp.ones((WIDTH, WIDTH)), jnp.ones((EXAMPLES, WIDTH)))


@pytest.mark.parametrize("at", [2, 14])
def test_the_last_microbatch_with_the_update(at: int) -> None:
    """Where collectives are hidden, the last microbatch and the update are one program."""
    clean = state(), *examples(None, 0)
    analysis = analyse(train_step, *clean, batch_axes=(None, 0, 0))
    found = plan_analysis(analysis, hiding(cluster_of(1, 4)), recipes.zero(2), 2)
    lowered, schedule = found.lowered, found.plan.schedule
    assert lowered.loop_microbatches == 1
    worker = found.build(jax.devices())
    checked = CheckedWorker(worker.all_sources, worker.wiring)
    checked.look_for(["nan"], jax.tree.leaves((state(), *examples(1, at))))
    (launch, *_) = checked.launches["nan"]
    origin = origin_of(lowered, schedule, launch, "nan")
    assert origin is not None and f"test_origin.py:{line_of(1)}:" in str(origin)
    assert f"microbatch {at * 2 // EXAMPLES} of 2" in str(origin)
