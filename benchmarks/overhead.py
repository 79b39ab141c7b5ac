"""What autopar costs beside the same thing written by hand: `python -m benchmarks.overhead --json FILE`.

Each bar compares one train step of a GPT, planned by autopar, with `jax.jit` of the same step: on one device, and
on 8 virtual devices with the sharding of the recipe written by hand as `NamedSharding`s.

How a bar is measured:
1. Three programs: autopar's, the hand-written one, and the hand-written one compiled a second time.
2. Each round runs the three once, in random order, each on its own state, and takes their times.
3. Two statistics of autopar's time over the hand-written one's: the median over the rounds of the ratios, and the
   ratio of the medians; each with a 95 % bootstrap interval. The bar is held against the larger upper end.
4. The same of the second copy over the first: the A/A ratio, which says what the measurement can tell apart.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.stats
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks import common, text
from benchmarks.models import gpt, shared

DEVICES = 8
ROUNDS = 100
SHORTEST_STEP = 0.1  # seconds
BATCH_SIZE = 8  # examples per step
CONFIG = gpt.GPTConfig(text.VOCABULARY, sequence_length=128, num_layers=4, width=192, num_heads=8)

Step = Callable[[shared.State, shared.Batch], tuple[shared.State, shared.Metrics]]


@dataclasses.dataclass
class Program:
    """A compiled step and the state that it works on."""

    step: Step
    state: shared.State

    def seconds(self, batch: shared.Batch) -> float:
        """Time of one step, all its outputs there."""
        started = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One time over another."""

    value: float
    low: float  # ends of the 95 % bootstrap interval
    high: float


def _bootstrap(samples: Sequence[np.ndarray], statistic: Callable[..., Any], seed: int) -> Ratio:
    with warnings.catch_warnings():
        # Of a degenerate sample (all resamples alike): the interval is then NaN, which no bar passes.
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)
        interval = scipy.stats.bootstrap(
            samples,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=9999,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Ratio(float(statistic(*samples, axis=-1)), float(interval.low), float(interval.high))


def median_of_ratios(times: np.ndarray, reference: np.ndarray, seed: int) -> Ratio:
    """Of seconds per round: the drift of the machine cancels within each round."""
    return _bootstrap([times / reference], lambda r, axis: np.median(r, axis=axis), seed)


def ratio_of_medians(times: np.ndarray, reference: np.ndarray, seed: int) -> Ratio:
    """Of seconds per round, resampled by whole rounds."""
    return _bootstrap([times, reference], lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis), seed)


def interleaved(programs: Sequence[Program], batch: shared.Batch, rounds: int, seed: int) -> np.ndarray:
    """Seconds, (rounds, programs); the order within a round is random."""
    random = np.random.default_rng(seed)
    times = np.empty((rounds, len(programs)))
    for row in times:
        for index in random.permutation(len(programs)):
            row[index] = programs[index].seconds(batch)
    return times


def replicated(mesh: Mesh, state: shared.State) -> Any:
    """Data parallelism by hand: every device holds the whole state."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), state)


# Megatron-LM's cuts (Shoeybi et al. 2019, section 3) by the last name on a leaf's path: heads and hidden units over the
# devices, by columns going in and by rows coming out, the embedding by rows of the vocabulary; all else replicated.
_MEGATRON = {
    "query": P(None, "model", None),
    "query_bias": P("model", None),
    "key": P(None, "model", None),
    "value": P(None, "model", None),
    "value_bias": P("model", None),
    "out": P("model", None, None),
    "up": P(None, "model"),
    "up_bias": P("model"),
    "down": P("model", None),
    "tokens": P("model", None),
}


def megatron(mesh: Mesh, state: shared.State) -> Any:
    """Tensor parallelism by hand. AdamW's moments lie as their parameters do."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        spec = _MEGATRON.get(str(getattr(path[-1], "key", "")), P())
        # The state's own "key", a scalar, is not the projection of that name.
        return NamedSharding(mesh, spec if len(spec) == leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(sharding, state)


def written_by_hand(optimizer: Any, state_shardings: Any, batch_sharding: Any) -> jax.stages.Wrapped:
    """`jax.jit` of the step with every sharding stated and the state donated."""
    return jax.jit(
        gpt.make_train_step(CONFIG, optimizer),
        in_shardings=(state_shardings, batch_sharding),
        out_shardings=(state_shardings, None),
        donate_argnums=0,
    )


def collectives(texts: Iterable[str]) -> dict[str, int]:
    """Collectives in compiled HLO by kind: a ratio compares like with like only where both programs have some."""
    kinds = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return dict(collections.Counter(kind for text in texts for kind in re.findall(kinds, text)))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One bar: what autopar is told, and the same by hand."""

    name: str
    limit: float
    num_devices: int
    method: Any  # of `autopar.parallelize`
    state_shardings: Callable[[Mesh, shared.State], Any]
    batch_spec: P


def comparisons() -> list[Comparison]:
    """The three bars."""
    recipes = autopar.recipes
    tensor = recipes.megatron(dp=1, tp=DEVICES, pp=1, num_microbatches=1)
    return [
        Comparison("one_device", 1.03, 1, "auto", replicated, P()),
        Comparison("data_parallel", 1.05, DEVICES, recipes.data_parallel(), replicated, P("model")),
        Comparison("megatron_tp8", 1.05, DEVICES, tensor, megatron, P()),
    ]


def host_microseconds_per_instruction(
    executable: autopar.Executable, program: Program, batch: shared.Batch, steps: int = 10
) -> float:
    """What the worker takes on the host to issue one instruction, the median over some steps.

    Where a backend computes small programs in the calling thread, that is in it too.
    """
    times = []
    for _ in range(steps):
        program.state, metrics = executable(program.state, batch)
        times.append(executable.dispatch_seconds)
        jax.block_until_ready((program.state, metrics))
    return float(np.median(times)) / executable.instruction_count * 1e6


def compare(comparison: Comparison, rounds: int, seed: int) -> dict[str, Any]:
    """All numbers of one bar."""
    optimizer = shared.make_optimizer(1e-3, warmup_steps=10, decay_steps=10_000)
    init_state = gpt.make_init(CONFIG, optimizer)
    key = jax.random.key(seed)
    shapes = jax.eval_shape(init_state, key)
    devices = jax.devices()[: comparison.num_devices]
    mesh = Mesh(np.array(devices), ("model",))
    state_shardings = comparison.state_shardings(mesh, shapes)
    batch_sharding = NamedSharding(mesh, comparison.batch_spec)

    planned = autopar.parallelize(
        gpt.make_train_step(CONFIG, optimizer),
        cluster=autopar.cluster_from_devices(devices),
        method=comparison.method,
        num_microbatches=1,
    )
    executable = planned.compile(shapes, gpt.abstract_batch(CONFIG, BATCH_SIZE))
    programs = [Program(planned, planned.init(init_state, key))]
    for _ in range(2):
        by_hand = jax.jit(init_state, out_shardings=state_shardings)(key)
        programs.append(Program(written_by_hand(optimizer, state_shardings, batch_sharding), by_hand))

    compiled = (
        written_by_hand(optimizer, state_shardings, batch_sharding)
        .lower(shapes, gpt.abstract_batch(CONFIG, BATCH_SIZE))
        .compile()
    )
    # Every program is given the batch as a user has it: on the host.
    batch = text.train_batch(text.standard_library(), BATCH_SIZE, CONFIG.sequence_length, seed, 0)
    interleaved(programs, batch, 3, seed)  # compile and warm up
    ours, hand, copy = interleaved(programs, batch, rounds, seed).T
    row = {
        "name": comparison.name,
        "rounds": rounds,
        "median_seconds": float(np.median(ours)),
        "median_seconds_by_hand": float(np.median(hand)),
        "long_enough": bool(np.median(hand) >= SHORTEST_STEP),
        "collectives": collectives(executable.as_text().values()),
        "collectives_by_hand": collectives([compiled.as_text() or ""]),
        "host_microseconds_per_instruction": host_microseconds_per_instruction(executable, programs[0], batch),
    }
    for name, statistic in (("median_of_ratios", median_of_ratios), ("ratio_of_medians", ratio_of_medians)):
        row[name] = dataclasses.asdict(statistic(ours, hand, seed))
        row[f"{name}_a_a"] = dataclasses.asdict(statistic(copy, hand, seed))
    return row


def bar(row: dict[str, Any], limit: float) -> common.Bar:
    """Against the larger upper end; steps too short to be told from noise break it."""
    upper = max(row["median_of_ratios"]["high"], row["ratio_of_medians"]["high"])
    return common.Bar(upper if row["long_enough"] else float("nan"), limit, n=row["rounds"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description="autopar against jax.jit by hand."
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds per bar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    common.use_virtual_devices(DEVICES)
    rows, bars = [], {}
    for comparison in comparisons():
        row = compare(comparison, arguments.rounds, arguments.seed)
        rows.append(row)
        bars[comparison.name] = bar(row, comparison.limit)
        for name in ("median_of_ratios", "median_of_ratios_a_a"):
            bars[f"{comparison.name}_{name}"] = common.Bar(row[name]["value"], None, n=arguments.rounds)
        ratio, control = row["median_of_ratios"], row["median_of_ratios_a_a"]
        print(
            f"{comparison.name}: {row['median_seconds']:.3f} s, by hand {row['median_seconds_by_hand']:.3f} s; "
            f"ratio {ratio['value']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}], "
            f"A/A {control['value']:.4f} [{control['low']:.4f}, {control['high']:.4f}]; "
            f"{row['host_microseconds_per_instruction']:.1f} µs of host time per instruction; "
            f"collectives {row['collectives']}, by hand {row['collectives_by_hand']}"
        )
    common.report(bars, rows, arguments.json)


if __name__ == "__main__":
    main()
