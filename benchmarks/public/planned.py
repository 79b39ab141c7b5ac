"""How long public code takes to plan: `python -m benchmarks.public.planned --json FILE`.

A residual MLP of ever more blocks, trained by AdamW as it stands, in `optax.MultiSteps`, with an average of its
parameters, and with gradients added up by hand, within a step and from step to step, on 8 A100s; nanodo's default,
whose optimizer is in MultiSteps; a Flax language model of 24 unrolled layers and 1.3 billion parameters on 16, the text
report of its plan once saved, and five methods of it compared. Seconds are CPU time of the process and its
children, tracing included, in a process of its own that has planned something small before; a case that takes too long
is given up.

Bars: the seconds of each case (of a comparison, those of each method), and the exponent of time over parameters where
steps hold more than the optimizer's state.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.errors import UserError
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.planned import Planned
from benchmarks import common, growth
from benchmarks.public import linen_models, linen_vision
from benchmarks.public.program import Sizes, Step, Variant, cross_entropy
from benchmarks.public.programs import LARGE
from benchmarks.verifiable import plan

BLOCKS = (4, 8, 16, 24)
_GIVE_UP = 150.0  # CPU seconds
_MICROBATCHES = 4  # of what is added up by hand
_POINTS = dataclasses.replace(LARGE, batch_size=4096, vocabulary=128)
_NANODO = Sizes(width=512, heads=8, hidden=2048, vocabulary=32101, length=512, batch_size=256, image=0)
_LARGE = Sizes(width=2048, heads=16, hidden=8192, vocabulary=32000, length=1024, batch_size=256, image=0)


def _adamw(blocks: int) -> Step:
    return linen_vision.residual_mlp(_POINTS, Variant(blocks))


def _multi_steps(blocks: int) -> Step:
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=_MICROBATCHES)
    return linen_vision.residual_mlp(_POINTS, Variant(blocks), optimizer.gradient_transformation())


def _average(blocks: int) -> Step:
    """A moving average of the parameters beside them."""
    step = _adamw(blocks)

    def train_step(state: Any, x: Any, y: Any) -> Any:
        inner, metrics = step.function(state["train"], x, y)
        average = optax.incremental_update(inner.params, state["average"], step_size=1e-3)
        return {"train": inner, "average": average}, metrics

    def init(key: jax.Array) -> Any:
        inner = step.init(key)
        return {"train": inner, "average": inner.params}

    return dataclasses.replace(step, function=train_step, init=init)


def _gradient(state: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, x, train=True), y)

    return jax.value_and_grad(loss_fn)(state.params)


def _summed_in_a_loop(blocks: int) -> Step:
    """A scan over parts of the batch."""
    step = _adamw(blocks)

    def train_step(state: Any, x: Any, y: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            found = _gradient(state, *part)
            return jax.tree.map(jnp.add, total, found), None

        parts = jax.tree.map(lambda a: a.reshape(_MICROBATCHES, -1, *a.shape[1:]), (x, y))
        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
        (loss, grads), _ = jax.lax.scan(add, zero, parts)
        state = state.apply_gradients(grads=jax.tree.map(lambda g: g / _MICROBATCHES, grads))
        return state, {"loss": loss / _MICROBATCHES}

    return dataclasses.replace(step, function=train_step)


def _summed_over_steps(blocks: int) -> Step:
    """Sums in the state, which every fourth step applies."""
    step = _adamw(blocks)

    def train_step(state: Any, x: Any, y: Any) -> Any:
        loss, grads = _gradient(state["train"], x, y)
        total = jax.tree.map(jnp.add, state["sum"], grads)
        count = state["count"] + 1

        def apply(inner: Any, total: Any) -> Any:
            inner = inner.apply_gradients(grads=jax.tree.map(lambda g: g / _MICROBATCHES, total))
            return inner, jax.tree.map(jnp.zeros_like, total)

        inner, total = jax.lax.cond(count % _MICROBATCHES == 0, apply, lambda *kept: kept, state["train"], total)
        return {"train": inner, "sum": total, "count": count}, {"loss": loss}

    def init(key: jax.Array) -> Any:
        inner = step.init(key)
        return {"train": inner, "sum": jax.tree.map(jnp.zeros_like, inner.params), "count": jnp.zeros((), jnp.int32)}

    return dataclasses.replace(step, function=train_step, init=init)


_SERIES: Mapping[str, Callable[[int], Step]] = {
    "adamw": _adamw,
    "MultiSteps": _multi_steps,
    "average": _average,
    "summed in a loop": _summed_in_a_loop,
    "summed over steps": _summed_over_steps,
}
_LINEAR = ("MultiSteps", "average", "summed in a loop", "summed over steps")  # at most about linear in the parameters


def _nanodo() -> Step:
    return linen_models.decoder(_NANODO, Variant(6), linen_models.nanodo_optimizer())


def _language_model() -> Step:
    return linen_models.language_model(_LARGE, Variant(24))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is planned; `series` names those that differ in size alone."""

    name: str
    devices: int
    limit: float  # CPU seconds
    what: str = "plan"  # or "report", or "compare"
    series: str = ""
    blocks: int = 0

    def step(self) -> Step:
        """The step and its arguments."""
        if self.series:
            return _SERIES[self.series](self.blocks)
        return _nanodo() if self.name == "nanodo" else _language_model()


def cases() -> list[Case]:
    """All of them."""
    return [
        *(
            Case(f"residual mlp, {series}, {blocks} blocks", 8, 15.0, series=series, blocks=blocks)
            for series in _SERIES
            for blocks in BLOCKS
        ),
        Case("nanodo", 8, 20.0),
        Case("language model of 24 layers", 16, 15.0),
        Case("language model of 24 layers, report", 16, 10.0, "report"),
        Case("language model of 24 layers, compare", 16, 15.0, "compare"),
    ]


# Compared: the usual ones of two hosts.
_METHODS: Mapping[str, Method] = {
    "auto": AUTO,
    "data parallel": recipes.data_parallel(),
    "ZeRO-3": recipes.zero(3),
    "megatron": recipes.megatron(2, 8, 1, 1),
    "megatron, two stages": recipes.megatron(1, 8, 2, 8),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a case took."""

    case: str
    series: str
    limit: float
    parameters: int
    seconds: Mapping[str, float]  # CPU, by what was done; of what counts
    plan: str  # or why there is none

    @property
    def longest(self) -> float:
        """CPU seconds that the bar is about."""
        return max(self.seconds.values())


class _GivenUpError(BaseException):
    """Not an Exception, which a planner may catch."""


def _give_up(*_: Any) -> NoReturn:
    raise _GivenUpError


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(case: Case) -> Measured:
    """Plan it, and what else is asked for."""
    common.use_virtual_devices(1)
    with warnings.catch_warnings(action="ignore"):
        _plan(_adamw(2), 8, AUTO)
        step = case.step()
        state = jax.eval_shape(step.init, jax.random.key(0))
        params = jax.tree.leaves(getattr(state, "params", None) or state["train"].params)
        seconds: dict[str, float] = {}
        signal.signal(signal.SIGPROF, _give_up)
        text = _run(case, step, seconds)
    number = sum(leaf.size for leaf in params)
    return Measured(case.name, case.series, case.limit, number, seconds, text)


def _plan(step: Step, devices: int, method: Method | Plan) -> Planned:
    cluster = load_preset("dgx-a100", num_hosts=-(-devices // 8), devices_per_host=min(8, devices))
    return plan(step.function, *step.abstract(), cluster=cluster, method=method)


def _run(case: Case, step: Step, seconds: dict[str, float]) -> str:
    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = _cpu()
        signal.setitimer(signal.ITIMER_PROF, _GIVE_UP)
        try:
            return work()
        except UserError as error:
            return f"{type(error).__name__}: {error}"[:200]
        except _GivenUpError:
            return f"{name}: given up"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            seconds[name] = _cpu() - started

    if case.what == "compare":
        trials = {name: functools.partial(_plan, step, case.devices, method) for name, method in _METHODS.items()}
        return "; ".join(_told(timed(name, trial)) for name, trial in trials.items())
    if case.what == "plan":
        return _told(timed("plan", lambda: _plan(step, case.devices, AUTO)))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plan.json"
        _plan(step, case.devices, recipes.zero(3, 1)).save(path)
        report = timed("report", lambda: _plan(step, case.devices, Plan.load(path)).report().to_text())
    return str(report).splitlines()[0]


def _told(found: Plan | str) -> str:
    if isinstance(found, str):
        return found
    stages = " + ".join("x".join(map(str, stage.mesh.shape)) for stage in found.stages)
    return f"{found.step_time:.4g} s a step in {found.num_microbatches} microbatches, {stages}"


def bars(rows: Sequence[Measured]) -> dict[str, common.Bar]:
    """Of the cases that were run."""
    found = {f"seconds_{row.case}": common.Bar(row.longest, row.limit) for row in rows}
    for series in _LINEAR:
        mine = [row for row in rows if row.series == series]
        if len(mine) > 1:
            numbers, times = [row.parameters for row in mine], [row.longest for row in mine]
            found[f"exponent_{series}"] = common.Bar(growth.exponent(numbers, times), 1.15)
    return found


def run(only: str | None, path: pathlib.Path | None) -> None:
    """Measure all whose name contains this text, one after the other, and report."""
    rows = []
    for row in common.each_in_a_process(measure, [c for c in cases() if only is None or only in c.name]):
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row.seconds.items())
        print(
            f"{row.case}: {row.parameters / 1e6:.1f} million parameters: {told} of CPU; {row.plan}",
            flush=True,
        )
        rows.append(row)
    common.report(bars(rows), [dataclasses.asdict(row) for row in rows], path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public.planned", description="Planning time on public code."
    )
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    run(arguments.only, arguments.json)


if __name__ == "__main__":
    main()
