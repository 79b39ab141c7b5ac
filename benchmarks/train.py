"""Train a byte-level GPT on Python's own standard library, on 8 virtual CPU devices: `make train`.

1. A reference: `jax.jit` of the step on one device.
2. Leg 1: the plan for this machine as it is.
3. Leg 2: the plan for a pretend cluster, two hosts of four small devices with a slow link between them,
   executed on the same virtual devices.
4. Leg 3: two processes of four devices each train the first half and save a checkpoint; this process restores it, into
   the plan of leg 1, and trains the second half.
Each leg starts from the same key and sees the same batches, so that its loss curve can be held against the reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import autopar
from autopar.ir.plan import LeafPlan
from benchmarks import common, text
from benchmarks.models import gpt, shared
from benchmarks.models.shared import Batch, Metrics, State

DEVICES = 8
PROCESSES = 2  # of leg 3
CHECKPOINTS, FIRST_HALF = "checkpoints", "first_half.json"  # what they leave
BATCH_SIZE = 8  # examples per step
CONFIG = gpt.GPTConfig(text.VOCABULARY, sequence_length=128, num_layers=4, width=128, num_heads=8)
HELD_OUT_BATCHES = 16

Step = Callable[[State, Batch], tuple[State, Metrics]]
Evaluate = Callable[[State, Batch], Metrics]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run gave."""

    name: str
    losses: tuple[float, ...]  # nats per byte, one a step
    untrained: float  # bits per byte on held-out text, before the first step
    trained: float  # the same after the last
    seconds: float  # of the steps, the first and its compilation left out
    tokens_per_second: float

    def then(self, second: Run) -> Run:
        """This run and another that went on where it ended."""
        seconds = self.seconds + second.seconds
        tokens = self.tokens_per_second * self.seconds + second.tokens_per_second * second.seconds
        losses = self.losses + second.losses
        return Run(self.name, losses, self.untrained, second.trained, seconds, tokens / seconds)


@dataclasses.dataclass(frozen=True)
class Planned:
    """The GPT's steps, planned and compiled."""

    step: autopar.Parallelized
    evaluate: autopar.Parallelized
    init: Callable[[jax.Array], State]
    plan: autopar.Plan


def pretend_cluster() -> autopar.Cluster:
    """Two hosts on which a pipeline of two tensor-parallel stages is the right answer.

    One step of the GPT is about 5 GFLOP. The devices are slow, so that it pays to use both hosts. The network is slower
    still: all-reducing the gradients (3.4 MB) over it every step takes longer than the bubble of a pipeline,
    which sends only activations (0.5 MB each way). Microbatches of one or two examples keep that bubble
    small, and four devices share such a microbatch only if they cut its operators. Replicated over the four, a stage's
    parameters, gradients and AdamW moments alone would take 6.7 MB of each device's memory.
    """
    device = autopar.DeviceKind(
        name="small",
        memory=6_000_000,
        memory_bandwidth=50e9,
        peak_flops={"float32": 20e9, "bfloat16": 20e9},
        matmul_efficiency=0.9,
        memory_efficiency=0.9,
        launch_overhead=1e-7,
        dispatch_overhead=1e-6,
        xla=autopar.XlaBackend(collective_combine_threshold=0, hides_latency=False),
    )
    fast = autopar.Link("inside a host", latency=1e-7, bandwidth=100e9)
    slow = autopar.Link("between hosts", latency=1e-4, bandwidth=10e6)
    return autopar.make_cluster("pretend", num_hosts=2, devices_per_host=4, kind=device, link=fast, network=slow)


def describe_cluster(cluster: autopar.Cluster) -> str:
    """A line per host and one for the network."""
    lines = [f"Cluster {cluster.name}: {cluster.num_devices} devices"]
    for index, host in enumerate(cluster.hosts):
        kind = host.kind
        lines.append(
            f"  host {index}: {host.num_devices} × {kind.name}, {kind.memory / 2**20:.1f} MiB each, "
            f"{kind.peak_flops['float32'] / 1e9:.1f} GFLOP/s, link {host.link.bandwidth / 1e9:.3g} GB/s"
        )
    return "\n".join([*lines, f"  network: {cluster.network.bandwidth / 1e9:.3g} GB/s"])


def tensor_sharded(leaves: Iterable[LeafPlan]) -> list[str]:
    """Paths of the weight matrices that are cut over a mesh axis which does not cut the batch of their stage.

    What is cut over an axis that cuts the batch as well may be ZeRO's doing, and stages that read no batch leave
    open which axes do: neither is counted.
    """
    leaves = list(leaves)
    data_axes: dict[int, set[str]] = {}  # by stage
    for leaf in leaves:
        if leaf.batch_axis is not None:
            data_axes.setdefault(leaf.stage, set()).update(leaf.sharding.dims[leaf.batch_axis])
    return [
        leaf.path
        for leaf in leaves
        if "['params']" in leaf.path
        and len(leaf.shape) > 1
        and leaf.stage in data_axes
        and leaf.sharding.axes - data_axes[leaf.stage]
    ]


def held_out_bits(evaluate: Evaluate, state: State, batches: Iterable[Batch]) -> float:
    """Mean loss in bits per byte."""
    return float(np.mean([float(evaluate(state, batch)["loss"]) for batch in batches])) / math.log(2)


def train(
    name: str,
    step: Step,
    evaluate: Evaluate,
    state: State,
    corpus: text.Text,
    steps: range,
    seed: int,
    out: Console,
) -> tuple[Run, State]:
    """Run these steps with a progress bar; also the last state. Reading each loss makes the clock honest."""
    held_out = text.held_out_batches(corpus, BATCH_SIZE, CONFIG.sequence_length, HELD_OUT_BATCHES)
    untrained = held_out_bits(evaluate, state, held_out)
    losses: list[float] = []
    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
    )
    tokens = BATCH_SIZE * CONFIG.sequence_length
    rate = 0.0
    with Progress(*columns, console=out) as progress:
        bar = progress.add_task(name, total=len(steps), loss=math.nan, rate=0.0)
        for done, index in enumerate(steps):
            batch = text.train_batch(corpus, BATCH_SIZE, CONFIG.sequence_length, seed, index)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            if done == 0:
                started = time.perf_counter()
            else:
                rate = done * tokens / (time.perf_counter() - started)
            progress.update(bar, advance=1, loss=losses[-1], rate=rate)
    seconds = time.perf_counter() - started
    return Run(name, tuple(losses), untrained, held_out_bits(evaluate, state, held_out), seconds, rate), state


def largest_difference(run: Run, reference: Run) -> float:
    """Largest relative difference of the two loss curves over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))


def planned(cluster: autopar.Cluster | None, steps: int) -> Planned:
    """The steps for a cluster, or for the devices there are; `steps`: how many a whole run has."""
    optimizer = make_optimizer(steps)
    init_state = gpt.make_init(CONFIG, optimizer)
    train_step = autopar.parallelize(gpt.make_train_step(CONFIG, optimizer), cluster=cluster)
    shapes = jax.eval_shape(init_state, jax.random.key(0))
    plan = train_step.compile(shapes, gpt.abstract_batch(CONFIG, BATCH_SIZE)).plan
    evaluate = autopar.parallelize(gpt.make_eval_step(CONFIG), follow=train_step)
    return Planned(train_step, evaluate, init_state, plan)


def planned_leg(
    name: str, cluster: autopar.Cluster, corpus: text.Text, steps: int, seed: int, out: Console
) -> tuple[Run, Planned]:
    """Plan the step for the cluster and train; also the plan."""
    out.print(describe_cluster(cluster), markup=False, highlight=False)
    ready = planned(cluster, steps)
    out.print(str(ready.plan), markup=False, highlight=False)
    state = ready.step.init(ready.init, jax.random.key(seed))
    run, _ = train(name, ready.step, ready.evaluate, state, corpus, range(steps), seed, out)
    return run, ready


def reference_run(corpus: text.Text, steps: int, seed: int, out: Console) -> Run:
    """The same step under `jax.jit` on one device."""
    optimizer = make_optimizer(steps)
    step = jax.jit(gpt.make_train_step(CONFIG, optimizer), donate_argnums=0)
    state = jax.jit(gpt.make_init(CONFIG, optimizer))(jax.random.key(seed))
    evaluate = jax.jit(gpt.make_eval_step(CONFIG))
    run, _ = train("jax.jit, one device", step, evaluate, state, corpus, range(steps), seed, out)
    return run


def restored_leg(here: Planned, corpus: text.Text, steps: int, seed: int, out: Console) -> Run:
    """The first half by two processes, which save their state, and the second by this one, which restores it."""
    half = steps // 2
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(__file__).with_name("train_processes.py")
        command = [
            sys.executable, "-m", "autopar", "run", "--processes", str(PROCESSES), "--devices-per-process",
            str(DEVICES // PROCESSES), os.fspath(script), folder, str(half), str(steps), str(seed),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.fspath(script.parents[1]), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True)
        first = Run(**json.loads((pathlib.Path(folder) / FIRST_HALF).read_text()))
        state = autopar.restore(pathlib.Path(folder) / CHECKPOINTS, like=here.step)
    out.print(f"restored on one process, after {int(state['step'])} steps", highlight=False)
    name = "one process again"
    second, _ = train(name, here.step, here.evaluate, state, corpus, range(half, steps), seed, out)
    if not math.isclose(second.untrained, first.trained, rel_tol=1e-4):
        raise SystemExit(f"NOT AS EXPECTED: {first.trained} bits when it was saved, {second.untrained} when restored")
    first = dataclasses.replace(first, losses=tuple(first.losses))
    out.print(f"held-out bits per byte: {first.trained:.6f} when it was saved, {second.untrained:.6f} when restored")
    return first.then(second)


def make_optimizer(steps: int) -> Any:
    """AdamW whose schedule ends with the run."""
    return shared.make_optimizer(1.5e-3, warmup_steps=min(15, steps // 2), decay_steps=max(steps, 2))


def _report(run: Run, reference: Run, out: Console) -> dict[str, Any]:
    difference = largest_difference(run, reference)
    out.print(
        f"held-out: {run.trained:.3f} bits per byte, untrained {run.untrained:.3f}; "
        f"loss curve within {difference:.1e} (relative) of jax.jit on one device\n",
        highlight=False,
    )
    return {**dataclasses.asdict(run), "largest_difference": difference}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description="Train a byte-level GPT.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: at least two")

    common.use_virtual_devices(DEVICES)
    out = Console()
    corpus = text.standard_library()
    out.print(f"{len(corpus.train):,} bytes of {corpus.num_files} source files", highlight=False)
    reference = reference_run(corpus, arguments.steps, arguments.seed, out)
    rows = [_report(reference, reference, out)]

    out.rule("Leg 1: this machine")
    here = autopar.cluster_from_devices(jax.devices())
    run, on_this_machine = planned_leg("this machine", here, corpus, arguments.steps, arguments.seed, out)
    rows.append(_report(run, reference, out))

    out.rule("Leg 2: a pretend cluster")
    run, pretended = planned_leg("pretend cluster", pretend_cluster(), corpus, arguments.steps, arguments.seed, out)
    rows.append(_report(run, reference, out))
    stages, cut = len(pretended.plan.stages), len(tensor_sharded(pretended.plan.leaves))
    as_expected = stages >= 2 and cut > 0
    out.print(
        f"check: {stages} pipeline stages (at least 2), "
        f"{cut} weight matrices cut over tensor-parallel axes (at least 1): "
        f"{'as expected' if as_expected else 'NOT AS EXPECTED'}",
        highlight=False,
    )

    out.rule("Leg 3: two processes, then one")
    run = restored_leg(on_this_machine, corpus, arguments.steps, arguments.seed, out)
    rows.append(_report(run, reference, out))
    if arguments.json is not None:
        common.write_json(arguments.json, common.result({}, rows))
    if not as_expected:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
