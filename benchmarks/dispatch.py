"""What the worker itself takes in steps of tiny programs: `python -m benchmarks.dispatch --json FILE`.

1. An instruction: a step in 16 microbatches on one device, of programs with about 10 and about 300 arguments. Of the
   host time of its instructions, what is not within the calls of the compiled programs, per call. Bar: 25 µs.
2. Leaves: a step with 1,000 leaves of state, on one device and on 8, beside `jax.jit` of the same step, with data
   parallelism written as `NamedSharding`s. Bar: 1.05 times that.
3. A pipeline: 8 stages and 64 microbatches of tiny programs, beside a loop written by hand over as many calls of
   compiled programs and of `jax.device_put`, in the same order (GPipe: all forward, then all backward). Bar: 1.15 times
   that.

Ratios are medians over interleaved rounds; of leaves, medians over five processes of those in each, since where a
process happens to put a thousand arrays shifts its ratio by a hundredth or more. With `--gpu` the GPUs that are there
instead of 8 virtual CPU devices. Where these are fewer, leaves on 8 are left out, and the pipeline has 4 stages; of
fewer than 4 several stages have the same.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks import common
from benchmarks.overhead import Program, interleaved
from benchmarks.pipeline_processes import train_step

DEVICES = 8
ROUNDS = 100
ARGUMENTS = (10, 300)
LEAVES = 1000
PROCESSES = 5  # that leaves are measured in
STAGES, MICROBATCHES = 8, 64
FEWER_STAGES = 4  # where there are fewer devices than stages
WIDTH = 16
MICROSECONDS, LEAVES_LIMIT, PIPELINE_LIMIT = 25.0, 1.05, 1.15


def sum_of_squares(params: Any, batch: Any) -> tuple[Any, Any]:
    """Gradient descent on the squares of all parameters, weighted by the examples."""

    def loss_of(params: Any) -> Any:
        return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) * jnp.mean(batch)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss


def parameters(count: int) -> dict[str, np.ndarray[Any, Any]]:
    """So many small leaves."""
    return {f"{k:04d}": np.full((8, 8), 0.01, np.float32) for k in range(count)}


class Stopwatch:
    """A compiled program that adds up the seconds of its calls, and of letting go of what each was given."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self._given: tuple[Any, ...] = ()
        self.seconds, self.calls = 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        self._given = ()
        results = self._program(*arguments)
        self.seconds += time.perf_counter() - started
        self._given = arguments
        self.calls += 1
        return results


def microseconds_per_instruction(arguments: int, rounds: int, microbatches: int = 16) -> dict[str, Any]:
    """Host time beyond the calls of the programs, per call: the median over some steps."""
    leaves = (arguments - 1) // 2  # a leaf and the running sum of its gradients
    batch = np.ones((microbatches * 4, 8), np.float32)
    step = autopar.parallelize(
        sum_of_squares, devices=jax.devices()[:1], num_microbatches=microbatches, batch_axes=(None, 0)
    )
    state, _ = step(parameters(leaves), batch)
    state, _ = step(state, batch)
    worker = step.compile(state, batch)._worker
    watches = {number: Stopwatch(program) for number, program in worker._calls.items()}
    worker._calls.update(watches)
    found = []
    for _ in range(rounds):
        for watch in watches.values():
            watch.seconds, watch.calls = 0.0, 0
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        seconds, calls = (sum(each) for each in zip(*((w.seconds, w.calls) for w in watches.values()), strict=True))
        found.append((worker.dispatch_seconds - seconds) / calls * 1e6)
    taken = max(len(source.inputs) for source in worker.sources)
    return {
        "part": "instruction", "wanted": arguments, "arguments": taken, "microseconds": float(np.median(found)),
        "rounds": rounds,
    }  # fmt: skip


def _row(part: str, programs: Sequence[Program], batch: Any, rounds: int, **rest: Any) -> dict[str, Any]:
    """Of ours and of what is written by hand, which take turns."""
    interleaved(programs, batch, 3, 0)  # compiled, and warm
    times = interleaved(programs, batch, rounds, 0)
    ours, hand = np.median(times, axis=0)
    ratio = float(np.median(times[:, 0] / times[:, 1]))
    return {"part": part, **rest, "seconds": ours, "seconds_by_hand": hand, "ratio": ratio, "rounds": len(times)}


def many_leaves(leaves: int, devices: int, rounds: int) -> dict[str, Any]:
    """A step over one written by hand."""
    chosen = jax.devices()[:devices]
    mesh = Mesh(np.array(chosen), ("data",))
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    by_hand = jax.jit(sum_of_squares, in_shardings=(whole, cut), out_shardings=(whole, whole), donate_argnums=0)
    method = autopar.recipes.data_parallel() if devices > 1 else "auto"
    step = autopar.parallelize(sum_of_squares, devices=chosen, method=method, batch_axes=(None, 0))
    programs = Program(step, parameters(leaves)), Program(by_hand, jax.device_put(parameters(leaves), whole))
    return _row("leaves", programs, np.ones((8, 8), np.float32), rounds, leaves=leaves, devices=devices)


class ByHand:
    """The step of `benchmarks.pipeline` as one writes it for the occasion: GPipe, of `jax.vjp` under `jax.jit`."""

    def __init__(self, devices: Sequence[jax.Device], microbatches: int) -> None:
        self._devices, self._count = devices, microbatches

        def layer(w: Any, x: Any) -> Any:
            return jnp.tanh(x @ w)

        def last(w: Any, x: Any, y: Any, total: Any, losses: Any) -> Any:
            loss, (dw, dx) = jax.value_and_grad(lambda w, x: jnp.mean((layer(w, x) - y) ** 2), (0, 1))(w, x)
            return dx, total + dw, losses + loss

        def backward(of_layer: Any, gradient: Any, total: Any) -> Any:
            dw, dx = of_layer(gradient)
            return dx, total + dw

        self._forward = jax.jit(lambda w, x: jax.vjp(layer, w, x))
        self._last = jax.jit(last, donate_argnums=(3, 4))
        self._backward = jax.jit(backward, donate_argnums=2)
        self._zeros = jax.jit(lambda w: (jnp.zeros_like(w), jnp.zeros(())))
        self._update = jax.jit(lambda w, total: w - 0.01 / microbatches * total, donate_argnums=0)
        self._mean = jax.jit(lambda losses: losses / microbatches)

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        devices = self._devices
        rows = len(batch["x"]) // self._count
        cut = [slice(k * rows, (k + 1) * rows) for k in range(self._count)]
        inputs = [jax.device_put(batch["x"][at], devices[0]) for at in cut]
        labels = [jax.device_put(batch["y"][at], devices[-1]) for at in cut]
        totals, losses = map(list, zip(*map(self._zeros, params), strict=True))
        held: list[tuple[Any, list[Any]]] = []
        for x in inputs:
            layers = []
            for w, there in zip(params[:-1], devices[1:], strict=True):
                hidden, of_layer = self._forward(w, x)
                layers.append(of_layer)
                x = jax.device_put(hidden, there)
            held.append((x, layers))
        for (x, layers), y in zip(held, labels, strict=True):
            gradient, totals[-1], losses[-1] = self._last(params[-1], x, y, totals[-1], losses[-1])
            for stage in reversed(range(len(layers))):
                gradient = jax.device_put(gradient, devices[stage])
                gradient, totals[stage] = self._backward(layers[stage], gradient, totals[stage])
        new = [self._update(w, total) for w, total in zip(params, totals, strict=True)]
        return new, self._mean(losses[-1])


def pipeline(stages: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """A pipeline over the same written by hand; both have the same result.

    Raises:
      AssertionError: they have not.
    """
    numbers = np.random.default_rng(0)
    weights = numbers.normal(size=(stages, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    batch = {name: numbers.normal(size=(microbatches * 4, WIDTH)).astype(np.float32) for name in "xy"}
    method = autopar.recipes.pipeline([(1, (1,))] * stages, microbatches, "gpipe")
    devices = list(itertools.islice(itertools.cycle(jax.devices()), stages))
    step, by_hand = autopar.parallelize(train_step, devices=devices, method=method), ByHand(devices, microbatches)
    start = [jax.device_put(w, device) for w, device in zip(weights, devices, strict=True)]
    ours, hand = step({str(k): w for k, w in enumerate(weights)}, batch), by_hand(start, batch)
    np.testing.assert_allclose(autopar.gather(ours[1]), hand[1], rtol=1e-4)
    for mine, theirs in zip(autopar.gather(ours[0]).values(), hand[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    programs = Program(step, ours[0]), Program(by_hand, hand[0])
    return _row("pipeline", programs, batch, rounds, stages=stages, microbatches=microbatches)


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, common.Bar]:
    """One for each row."""
    bars = {}
    for row in rows:
        if row["part"] == "instruction":
            name, value, limit = f"microseconds_with_{row['wanted']}_arguments", row["microseconds"], MICROSECONDS
        elif row["part"] == "leaves":
            name, value, limit = f"leaves_on_{row['devices']}", row["ratio"], LEAVES_LIMIT
        else:
            name, value, limit = "pipeline", row["ratio"], PIPELINE_LIMIT
        bars[name] = common.Bar(value, limit, n=row["rounds"])
    return bars


def _over_processes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of those that several processes have for the same."""
    middle = {key: float(np.median([row[key] for row in rows])) for key in ("seconds", "seconds_by_hand", "ratio")}
    return {**rows[0], **middle, "rounds": sum(row["rounds"] for row in rows), "ratios": [row["ratio"] for row in rows]}


def _devices() -> tuple[str, int]:
    return jax.default_backend(), jax.device_count()


def _part(part: tuple[bool, Callable[..., Any], tuple[Any, ...]]) -> Any:
    """What a process of its own does: whether it uses GPUs, a function and its arguments."""
    gpu, work, arguments = part
    if not gpu:
        common.use_virtual_devices(DEVICES)
    return work(*arguments)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds")
    parser.add_argument("--gpu", action="store_true", help="on the GPUs that are there")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    def each(work: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Any]:
        return list(common.each_in_a_process(_part, [(arguments.gpu, work, call) for call in calls]))

    ((backend, there),) = each(_devices, ())
    if arguments.gpu and backend != "gpu":
        parser.error("--gpu: JAX finds no GPU here.")
    rounds = arguments.rounds

    rows = each(microseconds_per_instruction, *((count, rounds) for count in ARGUMENTS))
    for devices in (1, DEVICES):
        if devices <= there:
            call = (LEAVES, devices, -(-rounds // 2))
            rows.append(_over_processes(each(many_leaves, *[call] * PROCESSES)))
    stages = STAGES if there >= STAGES else FEWER_STAGES
    rows += each(pipeline, (stages, MICROBATCHES, max(1, rounds // 4)))
    for row in rows:
        told = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
        print(", ".join(told))
    common.report(bars_of(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
