"""Plans that people write by hand, as methods: what is not fixed here the same solver fills in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.ir.method import Method, StageMethod
from autopar.ir.schedule import ScheduleName


def data_parallel(num_microbatches: int | None = 1) -> Method:
    """Every device holds all state and takes a share of the examples; gradients are all-reduced."""
    return Method("data_parallel", 1, num_microbatches, (-1,), data_axes=("x",), zero=0)


def zero(stage: int, num_microbatches: int | None = 1) -> Method:
    """ZeRO (Rajbhandari et al. 2020): data parallel with sharded optimizer state (1), gradients (2), parameters (3).

    Raises:
      PlanError: `stage` is none of 1, 2, 3.
    """
    if stage not in (1, 2, 3):
        raise PlanError(f"zero(stage={stage!r}): stage must be 1, 2 or 3.")
    return Method(f"zero_{stage}", 1, num_microbatches, (-1,), data_axes=("x",), zero=stage)


def megatron(dp: int, tp: int, pp: int, num_microbatches: int) -> Method:
    """Megatron-LM (Narayanan et al. 2021): `pp` stages, each on a mesh of `dp` x `tp` devices, 1F1B.

    Raises:
      PlanError: a degree is not a positive integer.
    """
    for name, degree in {"dp": dp, "tp": tp, "pp": pp, "num_microbatches": num_microbatches}.items():
        if not isinstance(degree, int) or degree < 1:
            raise PlanError(f"megatron({name}={degree!r}): every degree must be a positive integer.")
    return Method(
        f"megatron(dp={dp}, tp={tp}, pp={pp})", pp, num_microbatches, (dp, tp), schedule="1f1b",
        data_axes=("x",), model_axes=("y",), zero=0,
    )  # fmt: skip


def gpipe(num_stages: int, num_microbatches: int) -> Method:
    """GPipe (Huang et al. 2019): a pipeline, all forwards before all backwards, data parallel within a stage."""
    return Method("gpipe", num_stages, num_microbatches, (-1,), schedule="gpipe", data_axes=("x",), zero=0)


def pipeline(
    stages: Sequence[tuple[int, tuple[int, ...]]], num_microbatches: int | None = None, schedule: ScheduleName = "1f1b"
) -> Method:
    """A pipeline whose stages and meshes are fixed; shardings are free.

    Each of `stages` is a number of layers and the shape of a mesh. The forward pass is cut into as many layers of like
    work as all stages have together, and the cluster's devices are dealt out in order.

    Raises:
      PlanError: there are no stages, or one is not a number of layers and the shape of a mesh of up to three
        dimensions, all positive integers.
    """
    fixed = tuple(_stage_method(at, stage) for at, stage in enumerate(stages))
    if not fixed:
        raise PlanError("pipeline(stages=()): there must be at least one stage, such as (4, (2, 4)).")
    return Method("pipeline", None, num_microbatches, stages=fixed, schedule=schedule)


def _stage_method(at: int, stage: Any) -> StageMethod:
    match stage:
        case (num_layers, ([_] | [_, _] | [_, _, _]) as shape):
            if all(type(n) is int and n > 0 for n in (num_layers, *shape)):
                return StageMethod(num_layers, tuple(shape))
    raise PlanError(
        f"pipeline(stages): stage {at} is {stage!r}; it must be a number of layers and the shape of a mesh of one to "
        "three dimensions, all positive integers, such as (4, (2, 4))."
    )


def intra_op_only() -> Method:
    """One stage on all devices; shardings are free."""
    return Method("intra_op_only", 1)


def inter_op_only(num_stages: int | None = None, num_microbatches: int | None = None) -> Method:
    """A pipeline of single devices; without `num_stages` one per device."""
    return Method("inter_op_only", num_stages, num_microbatches, (1,), data_axes=("x",), zero=0)
