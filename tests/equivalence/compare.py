"""Runs one case and the same step under `jax.jit` on one device, and says how far apart they are."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.models import shared
from benchmarks.models.shared import Batch, State
from tests.equivalence.cases import Case
from tests.equivalence.subjects import SUBJECTS, Subject

ADAMW_STEPS = 5
LOSS_LIMIT = 1e-5  # relative, after the AdamW steps
TREE_LIMIT = 1e-4  # relative, norm of the whole parameter tree after the AdamW steps
LEAF_LIMIT = 1e-4  # of a leaf's change in one SGD step, relative to the reference's change of that leaf ...
LEAF_FLOOR = 1e-7  # ... plus this much of the reference's change of the whole tree

# Whether by SGD (else AdamW), batches -> what is compared of the state before and after, and the last loss.
Run = Callable[[bool, list[Batch]], tuple[Any, Any, float]]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What one device gives: the trees as numpy, computed once for all cases."""

    adamw_state: Any
    adamw_loss: float  # of the last step
    sgd_change: Any


@dataclasses.dataclass(frozen=True)
class Deviation:
    loss: float  # relative
    tree: float  # relative
    leaf: float  # largest over the leaves: ‖Δ−Δref‖ / (1e-4·‖Δref‖ + 1e-7·‖Δref of the whole tree‖)
    worst_leaf: str
    stages: int  # of the plan that ran
    reductions: int  # all-reduces and reduce-scatters in the compiled programs

    @property
    def within(self) -> bool:
        """The bar; False if anything is NaN."""
        return self.loss <= LOSS_LIMIT and self.tree <= TREE_LIMIT and self.leaf <= 1.0


def adamw() -> optax.GradientTransformation:
    """As in real training; the schedule does not start at zero for long: step 2 of 5 has the full rate."""
    return shared.make_optimizer(1e-3, warmup_steps=1, decay_steps=10)


def sgd() -> optax.GradientTransformation:
    """A large rate, so that rounding the new parameters does not hide what is compared: their change."""
    return optax.sgd(100.0)


def either() -> optax.GradientTransformation:
    """AdamW and SGD in one step, which is planned and compiled once for both: its state says which of them counts."""

    def init(params: Any) -> Any:
        return {"adamw": adamw().init(params), "by_sgd": jnp.bool_(False)}

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        by_adamw, adamw_state = adamw().update(gradient, state["adamw"], params)
        by_sgd, _ = sgd().update(gradient, sgd().init(params))
        updates = jax.tree.map(lambda a, b: jnp.where(state["by_sgd"], b, a), by_adamw, by_sgd)
        return updates, {"adamw": adamw_state, "by_sgd": state["by_sgd"]}

    return optax.GradientTransformation(init, update)


def beginning(state: State, by_sgd: bool) -> State:
    """A copy of the state on the host, for AdamW or for SGD."""

    def copy(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.array(leaf)
        return jax.random.wrap_key_data(jnp.array(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))

    opt_state = {**state["opt_state"], "by_sgd": np.bool_(by_sgd)}
    return cast(State, jax.tree.map(copy, {**state, "opt_state": opt_state}))


@functools.cache
def batches(subject: Subject, config: Any, count: int, batch_size: int) -> list[Batch]:
    """On the host, as a data loader gives them."""
    keys = jax.random.split(jax.random.key(0), count)
    return [_on_host(subject.model.random_batch(config, batch_size, key)) for key in keys]


def norm(tree: Any) -> float:
    """Euclidean norm over all leaves, in float64."""
    squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(squares)))


def _difference(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b)


def _on_host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)  # copies: the originals are donated to the next step


def compared(state: State) -> Any:
    """What of the state is compared, on the host."""
    return _on_host({name: state[name] for name in ("params", "statistics")})


def measure(run: Run, subject: Subject, config: Any, batch_size: int) -> Reference:
    """The two experiments of the bar: five AdamW steps, and one SGD step from the same start."""
    data = batches(subject, config, ADAMW_STEPS, batch_size)
    _, adamw_state, loss = run(False, data)
    before, after, _ = run(True, data[:1])
    return Reference(adamw_state, loss, _difference(after, before))


@functools.cache
def made_on_one_device(subject: Subject, config: Any) -> State:
    """The state that it starts from."""
    init = jax.jit(subject.model.make_init(config, either()))
    return cast(State, init(jax.random.key(0)))


def on_one_device(subject: Subject, config: Any) -> Run:
    """Under `jax.jit`."""
    step = jax.jit(subject.model.make_train_step(config, either()), donate_argnums=0)
    start = made_on_one_device(subject, config)

    def run(by_sgd: bool, data: list[Batch]) -> tuple[Any, Any, float]:
        state = beginning(start, by_sgd)
        before = compared(state)
        for batch in data:
            state, metrics = step(state, batch)
        return before, compared(state), float(metrics["loss"])

    return run


@functools.cache
def reference(model: str, num_layers: int, batch_size: int) -> Reference:
    """Computed once per process."""
    subject = SUBJECTS[model]
    config = subject.config(num_layers)
    return measure(on_one_device(subject, config), subject, config, batch_size)


def deviation(measured: Reference, expected: Reference, stages: int, reductions: int) -> Deviation:
    """How far `measured` is from `expected`, in the bar's terms."""
    whole = norm(expected.sgd_change)
    leaves = {}
    expected_leaves = jax.tree_util.tree_leaves_with_path(expected.sgd_change)
    for (path, wanted), got in zip(expected_leaves, jax.tree.leaves(measured.sgd_change), strict=True):
        leaves[jax.tree_util.keystr(path)] = norm(got - wanted) / (LEAF_LIMIT * norm(wanted) + LEAF_FLOOR * whole)
    # NaN must win: max() alone would depend on where it stands.
    worst = max(leaves, key=lambda name: np.inf if np.isnan(leaves[name]) else leaves[name])
    return Deviation(
        loss=abs(measured.adamw_loss - expected.adamw_loss) / abs(expected.adamw_loss),
        tree=norm(_difference(measured.adamw_state, expected.adamw_state)) / norm(expected.adamw_state),
        leaf=leaves[worst],
        worst_leaf=worst,
        stages=stages,
        reductions=reductions,
    )


def count_reductions(texts: Iterable[str]) -> int:
    """All-reduces and reduce-scatters of arrays in compiled HLO; a gradient's norm or a loss says nothing."""
    types = (re.findall(r"= (\(.*?\)|\S+) (?:all-reduce|reduce-scatter)(?:-start)?\(", text) for text in texts)
    return sum(re.search(r"\[\d", type_) is not None for found in types for type_ in found)


def _cluster(case: Case) -> autopar.Cluster:
    """Planned cases get hosts with a slow network between them, one per stage asked for; the others this machine.

    At 10 MFLOP/s all eight devices take about 0.3 s for the 20 MFLOP of a step of GPT (two layers). Over the network,
    activations of 16 kB go each way, where data parallelism across the hosts would send 100 kB of gradients.
    """
    if case.method != "planned":
        return autopar.cluster_from_devices(jax.devices()[: case.num_devices])
    kind = autopar.DeviceKind(
        name="slow",
        memory=10**9,
        memory_bandwidth=1e9,
        peak_flops={"float32": 1e7},
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        launch_overhead=1e-8,
        dispatch_overhead=1e-8,
        xla=autopar.XlaBackend(collective_combine_threshold=0, hides_latency=False),
    )
    link = autopar.Link("inside a host", latency=1e-8, bandwidth=1e10)
    network = autopar.Link("between hosts", latency=1e-5, bandwidth=2e5)
    return autopar.make_cluster(
        str(case),
        num_hosts=case.stages,
        devices_per_host=case.num_devices // case.stages,
        kind=kind,
        link=link,
        network=network,
    )


def _method(case: Case) -> Any:
    recipes = autopar.recipes
    match case.method:
        case "planned":
            return "auto"
        case "data_parallel":
            return recipes.data_parallel()
        case "zero":
            return recipes.zero(stage=int(case.variant.removeprefix("stage")))
        case "megatron":
            return recipes.megatron(
                dp=case.data_parallel, tp=case.tensor_parallel, pp=case.stages, num_microbatches=case.microbatches
            )
        case "gpipe":
            return recipes.gpipe(num_stages=case.stages, num_microbatches=case.microbatches)
        case "intra_op_only":
            return recipes.intra_op_only()
        case "inter_op_only":
            return recipes.inter_op_only(num_stages=case.stages, num_microbatches=case.microbatches)
    raise ValueError(case.method)


def run_case(case: Case, *, made_in_place: bool = True) -> Deviation:
    """Plan, run and compare; raises what autopar raises.

    `made_in_place`: the state it starts from is made where the plan has it, and not handed over as one device makes it.
    """
    subject, config = case.subject, case.subject.config(case.num_layers)
    model = subject.model
    key = jax.random.key(0)
    step = autopar.parallelize(
        model.make_train_step(config, either()),
        cluster=_cluster(case),
        method=_method(case),
        num_microbatches=case.microbatches,
    )
    executable = step.compile(
        jax.eval_shape(model.make_init(config, either()), key), model.abstract_batch(config, case.batch_size)
    )
    if executable.plan.num_microbatches != case.microbatches:
        raise AssertionError(f"{case}: the plan has {executable.plan.num_microbatches} microbatches")

    if made_in_place:
        start = autopar.gather(step.init(model.make_init(config, either()), key))
    else:
        start = made_on_one_device(subject, config)

    def run(by_sgd: bool, data: list[Batch]) -> tuple[Any, Any, float]:
        state = beginning(start, by_sgd)
        before = compared(state)
        for batch in data:
            state, metrics = step(state, batch)
        return before, compared(autopar.gather(state)), float(metrics["loss"])

    measured = measure(run, subject, config, case.batch_size)
    expected = reference(case.model, case.num_layers, case.batch_size)
    reductions = count_reductions(executable.as_text().values())
    stages = len({stage.mesh.devices for stage in executable.plan.stages})  # interleaved ones once
    return deviation(measured, expected, stages, reductions)
