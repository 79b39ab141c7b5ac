"""Train steps that are run by one process and by several: the results have to be the same to the bit."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import autopar
from autopar import recipes
from benchmarks.models import shared
from tests.equivalence.compare import LOSS_LIMIT, TREE_LIMIT, compared, norm
from tests.equivalence.subjects import SUBJECTS
from tests.planned import cluster_of

DEVICES = 4  # of a job, however many processes share them
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    model: str  # of SUBJECTS
    layers: int
    method: autopar.Method
    examples: int = 8
    across: bool = False  # neighbours on a mesh are of different processes
    hints: Mapping[str, tuple[int | None, ...]] = dataclasses.field(default_factory=dict)


def _pipeline(*stages: tuple[int, tuple[int, ...]], microbatches: int, schedule: Any = "1f1b") -> autopar.Method:
    return recipes.pipeline(stages, microbatches, schedule)


# Stages lie inside processes, across them and over several.
CASES: dict[str, Case] = {
    "zero-bubble-scan": Case(
        "gpt_scan", 2, _pipeline((1, (2,)), (1, (2,)), microbatches=4, schedule="zero-bubble"), across=True
    ),
}  # fmt: skip
SLOW: dict[str, Case] = {
    "zero3-moe": Case("moe", 2, recipes.zero(3, 2), 16),
    "zero-bubble-4-stages": Case("gpt_scan", 4, _pipeline(*[(1, (1,))] * 4, microbatches=4, schedule="zero-bubble")),
    "1f1b-tensor": Case("gpt", 2, recipes.megatron(1, 2, 2, 4), across=True),
    "data": Case("gpt", 2, recipes.data_parallel()),
    "interleaved": Case("gpt", 4, recipes.megatron(2, 1, 2, 2, 2)),
    "free-wide_resnet": Case("wide_resnet", 2, recipes.intra_op_only()),
    "tensor": Case("gpt_scan", 2, recipes.megatron(1, 4, 1)),
    "zero1": Case("gpt", 2, recipes.zero(1)),
    "expert-moe": Case("moe", 2, recipes.intra_op_only(), 16, hints=dict.fromkeys(
        ("state['params']*['experts']['up']", "state['params']*['experts']['down']"), (-1, None, None)
    )),
    "gpipe": Case("gpt", 4, recipes.gpipe(4, 4)),
    "uneven": Case("gpt", 3, _pipeline((1, (1,)), (1, (1,)), (1, (2,)), microbatches=2)),
    "moe-pipeline": Case("moe", 2, _pipeline((1, (2,)), (1, (2,)), microbatches=2), 16),
    "wide_resnet-pipeline": Case("wide_resnet", 2, _pipeline((1, (2,)), (1, (2,)), microbatches=1)),
    "decoder-uneven": Case("decoder", 4, _pipeline((3, (1, 2)), (1, (2,)), microbatches=4), across=True),
    "zero-bubble-tensor": Case("gpt", 2, _pipeline((1, (2,)), (1, (2,)), microbatches=4, schedule="zero-bubble")),
    "encoder_decoder": Case("encoder_decoder", 2, recipes.gpipe(2, 2)),
    "lstm": Case("lstm", 2, recipes.inter_op_only(4, 2)),
}  # fmt: skip


# Of one model, so that what one has saved every other can restore.
CHECKPOINTS: dict[str, Case] = {
    "uneven": Case("gpt_scan", 4, _pipeline((1, (1,)), (1, (1,)), (2, (2,)), microbatches=2)),
    "zero3": Case("gpt_scan", 4, recipes.zero(3, 2)),
    "data": Case("gpt_scan", 4, recipes.data_parallel()),
    "tensor": Case("gpt_scan", 4, recipes.megatron(1, 4, 1)),
    "gpipe": Case("gpt_scan", 4, recipes.gpipe(4, 4)),
    "1f1b-tensor": Case("gpt_scan", 4, recipes.megatron(1, 2, 2, 4), across=True),
    "apart": Case("gpt_scan", 4, _pipeline((3, (1, 2)), (1, (2,)), microbatches=4), across=True),
    "interleaved": Case("gpt_scan", 4, recipes.megatron(2, 1, 2, 2, 2)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A case, ready to run."""

    step: autopar.Parallelized
    plain: Callable[[Any, Any], Any]
    init: Callable[[jax.Array], Any]
    batches: list[Any]
    executable: autopar.Executable

    def start(self) -> Any:
        """The state before the first step."""
        return self.step.init(self.init, jax.random.key(0))


def compiled(case: Case, plan: autopar.Plan | None) -> Compiled:
    """By a plan, or by the one that is found."""
    subject = SUBJECTS[case.model]
    config = subject.config(case.layers)
    optimizer = shared.make_optimizer(1e-3, warmup_steps=1, decay_steps=10)
    init: Callable[[jax.Array], Any] = subject.model.make_init(config, optimizer)
    plain = subject.model.make_train_step(config, optimizer)
    step = autopar.parallelize(
        plain, cluster=None if plan else cluster_of(2, 2), method=plan or case.method,
        devices=[*jax.devices()[::2], *jax.devices()[1::2]] if case.across else None,
        hints={} if plan else case.hints,
    )  # fmt: skip
    batches = [subject.model.random_batch(config, case.examples, jax.random.key(i)) for i in range(STEPS)]
    executable = step.compile(jax.eval_shape(init, jax.random.key(0)), batches[0])
    # On all processes, whichever has planned.
    assert executable.plan.compiler is not None and (executable.plan.seconds is None) == (plan is not None)
    return Compiled(step, plain, init, [jax.tree.map(np.asarray, batch) for batch in batches], executable)


def train(case: Case, plan: autopar.Plan | None) -> tuple[autopar.Plan, str]:
    """A few steps; the plan, and a digest of the losses and the last state."""
    ready = compiled(case, plan)
    state = ready.start()
    losses = []
    for batch in ready.batches:
        state, metrics = ready.step(state, batch)
        losses.append(np.float32(metrics["loss"]))
    whole = autopar.gather(state)
    if jax.process_count() == 1:
        _check_with_jit(ready, losses, whole)
    return ready.executable.plan, digest((losses, whole))


def _check_with_jit(ready: Compiled, losses: Sequence[np.float32], whole: Any) -> None:
    """One device computes the same, but for rounding."""
    step, state = jax.jit(ready.plain), jax.jit(ready.init)(jax.random.key(0))
    for batch, loss in zip(ready.batches, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(loss, metrics["loss"], rtol=LOSS_LIMIT)
    mine, theirs = compared(whole), compared(state)
    far = norm(jax.tree.map(lambda a, b: a.astype(np.float64) - b, mine, theirs))
    assert far < TREE_LIMIT * norm(theirs), far / norm(theirs)


def digest(tree: Any) -> str:
    """Of the bits of whole arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return found.hexdigest()
