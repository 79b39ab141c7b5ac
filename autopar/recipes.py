"""Plans that people write by hand, as methods: what is not fixed here the same solver fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.ir.method import Method, StageMethod, data_shape
from autopar.ir.schedule import ScheduleName, schedule_names


def auto(
    *,
    data: bool | None = None,
    tensor: bool | None = None,
    pipeline: bool | None = None,
    spatial: bool | None = None,
    zero: int | None = None,
    remat: bool | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    schedule: ScheduleName | None = None,
    memory_limit: int | None = None,
    time_limit: float | None = None,
    baselines: bool = True,
) -> Method:
    """What "auto" searches, with parts of it fixed; None leaves a part to the search.

    Args:
      data, tensor, pipeline: True forces a kind of parallelism, False forbids it. Forced, examples are split over
        axis x of every stage's mesh, matrix products over axis y, and there are two stages or more.
      spatial: False forbids that convolutions are cut along their windows, which exchanges the borders.
      zero: 0 replicates state over the devices that split examples; 1 shards the optimizer state over them, 2 also the
        gradients, 3 also the parameters.
      remat: True computes the blocks that the model repeats again in the backward pass, as `jax.checkpoint` around each
        of them does, where that frees much; False keeps what the step itself keeps. None: in stages where memory is
        short, all of it or the best part is computed again where that is quicker.
      num_stages, num_microbatches: as they shall be.
      schedule: "1f1b", "gpipe", "zero-bubble" (1F1B, with the gradients of parameters computed where a stage would
        wait), or one that was given to `autopar.register_schedule`. None: 1F1B, its stages interleaved, or gradients
        computed later, where that is quicker.
      mesh_shape: the logical shape of every stage's mesh (axes x, y); (-1,): one axis.
      memory_limit: bytes that a plan may use of each device, where that is less than there are.
      time_limit: seconds after which planning ends soon, with the best plan found by then; without one it warns and
        takes the best recipe that fits. Plans then depend on how busy the machine is.
      baselines: False: plan without the recipes that are otherwise priced beside the search (in the plan's notes), and
        taken where one is quicker, or fits where the search finds nothing.

    Raises:
      PlanError: a value is out of range, or two contradict each other.
    """
    given = {name: value for name, value in locals().items() if value is not None or name == "baselines"}
    _check_auto(given)
    if baselines:
        del given["baselines"]
    if mesh_shape is not None:
        mesh_shape = tuple(mesh_shape)
    sharded = zero is not None and zero > 0
    forced = [axis for axis, wanted in {"x": data or sharded, "y": tensor}.items() if wanted]
    data_axes: tuple[str, ...] = ("x",) if data or zero is not None else ()
    model_axes: tuple[str, ...] = ("y", "z") if tensor or zero == 0 else ()
    if tensor is False and data is False:
        mesh_shape, data_axes, model_axes = (1,), ("x",), ()
    elif tensor is False:
        data_axes, model_axes = ("x", "y", "z"), ()
    elif data is False:
        # One axis is as good as any.
        data_axes, model_axes, forced = (), ("x", "y", "z"), ["x"] if tensor else []
    if mesh_shape is not None:
        forced = []  # it has them
    return Method(
        f"auto({', '.join(f'{name}={value!r}' for name, value in given.items())})" if given else "auto",
        1 if pipeline is False else num_stages, num_microbatches, mesh_shape, schedule=schedule, data_axes=data_axes,
        model_axes=model_axes, zero=zero, spatial=spatial is not False, min_stages=2 if pipeline else 1,
        axes=tuple(forced),
        memory_limit=memory_limit, time_limit=time_limit, baselines=baselines, remat=remat,
        options=tuple(given.items()),
    )  # fmt: skip


def _check_auto(given: Mapping[str, Any]) -> None:
    """Raise PlanError unless these options of `auto` are in range and may stand together."""

    def whole(least: int) -> Callable[[Any], bool]:
        return lambda x: type(x) is int and x >= least

    flags = ("data", "tensor", "pipeline", "spatial")
    schedules = [name for name in schedule_names() if name != "interleaved"]
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(flags, (lambda x: isinstance(x, bool), "True, False or None")),
        **dict.fromkeys(("num_stages", "num_microbatches", "memory_limit"), (whole(1), "a whole number above 0")),
        "baselines": (lambda x: isinstance(x, bool), "True or False"),
        "remat": (lambda x: isinstance(x, bool), "True, False or None"),
        "zero": (lambda x: whole(0)(x) and x <= 3, "0, 1, 2 or 3"),
        "mesh_shape": (_is_mesh_shape, "(-1,), or one to three whole numbers above 0"),
        "schedule": (lambda x: x in schedules, f"one of {', '.join(schedules)}"),
        "time_limit": (lambda x: isinstance(x, int | float) and x > 0, "a number of seconds above 0"),
    }
    for name, value in given.items():
        is_right, expected = ranges[name]
        if not is_right(value):
            raise PlanError(f"auto({name}={value!r}): {name} must be {expected}.")
    shape = given.get("mesh_shape", ())
    several = [axis for axis, n in zip("xyz", shape, strict=False) if n not in (1, -1)]
    contradictions: dict[tuple[str, ...], bool] = {
        ("data", "zero"): given.get("data") is False and given.get("zero", 0) > 0,
        ("pipeline", "num_stages"): given.get("pipeline") is (given.get("num_stages") == 1) and "num_stages" in given,
        ("data", "tensor", "pipeline"): all(given.get(kind) is False for kind in ("data", "tensor", "pipeline")),
        ("data", "mesh_shape"): given.get("data") is True and bool(shape) and shape != (-1,) and "x" not in several,
        ("tensor", "mesh_shape"): given.get("tensor") is True and bool(shape) and "y" not in several
        and given.get("data") is not False,
        ("data", "tensor", "mesh_shape"): given.get("data") is given.get("tensor") is False and bool(several),
    }  # fmt: skip
    for names, contradict in contradictions.items():
        if contradict:
            text = ", ".join(f"{name}={given[name]!r}" for name in names)
            raise PlanError(f"auto({text}): these contradict each other; leave one of them out.")


def _is_mesh_shape(shape: Any) -> bool:
    if not isinstance(shape, tuple | list):
        return False
    return tuple(shape) == (-1,) or (1 <= len(shape) <= 3 and all(type(n) is int and n > 0 for n in shape))


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
    return Method(f"zero_{stage}", 1, num_microbatches, (-1,), data_axes=("x", "y"), zero=stage)


def megatron(
    dp: int, tp: int, pp: int, num_microbatches: int | None = None, chunks: int = 1, zero: int = 0,
    sequence_parallel: bool | None = None,
) -> Method:  # fmt: skip
    """Megatron-LM (Narayanan et al. 2021): a pipeline over `pp` meshes of `dp` x `tp` devices, 1F1B.

    With several `chunks` each mesh has so many stages, interleaved with those of the others. Without a number of
    microbatches, it is found. With `zero` each group of `dp` devices shards what `recipes.zero` of that stage does; 1
    is what Megatron calls its distributed optimizer.

    With `sequence_parallel` each group of `tp` devices cuts matrix products as Megatron-LM does, along their heads and
    hidden dimensions, and what is between them along the sequence (Korthikanti et al. 2022); with False it keeps that
    whole, as Megatron-LM did until 2022. None: as is best.

    Raises:
      PlanError: a degree is not a positive integer, microbatches do not come in whole groups of `pp` for chunks, or
        `zero` is none of 0, 1, 2, 3, or `sequence_parallel` of True, False, None.
    """
    degrees = {"dp": dp, "tp": tp, "pp": pp, "chunks": chunks}
    if num_microbatches is not None:
        degrees["num_microbatches"] = num_microbatches
    for name, degree in degrees.items():
        if not isinstance(degree, int) or degree < 1:
            raise PlanError(f"megatron({name}={degree!r}): every degree must be a positive integer.")
    if type(zero) is not int or zero not in (0, 1, 2, 3):
        raise PlanError(f"megatron(zero={zero!r}): zero must be 0, 1, 2 or 3.")
    if sequence_parallel is not None and not isinstance(sequence_parallel, bool):
        raise PlanError(f"megatron(sequence_parallel={sequence_parallel!r}): it must be True, False or None.")
    data = data_shape(dp) if zero else (dp,)
    axes = ("x", "y", "z")[: len(data) + 1]
    fixed: dict[str, Any] = {
        "data_axes": axes[:-1], "model_axes": axes[-1:], "zero": zero, "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    ending = f", zero={zero}" if zero else ""
    ending += ")" if sequence_parallel is None else f", sequence_parallel={sequence_parallel})"
    if chunks == 1 or pp == 1:
        name = f"megatron(dp={dp}, tp={tp}, pp={pp}{ending}"
        return Method(name, pp, num_microbatches, (*data, tp), schedule="1f1b", **fixed)
    if num_microbatches is not None and num_microbatches % pp:
        raise PlanError(
            f"megatron(num_microbatches={num_microbatches}, chunks={chunks}): interleaved, the microbatches must be a "
            f"multiple of pp={pp}."
        )
    name = f"megatron(dp={dp}, tp={tp}, pp={pp}, chunks={chunks}{ending}"
    stages = (StageMethod(1, (*data, tp)),) * (pp * chunks)
    return Method(name, num_microbatches=num_microbatches, stages=stages, schedule="interleaved", **fixed)


def gpipe(num_stages: int, num_microbatches: int | None = None) -> Method:
    """GPipe (Huang et al. 2019): a pipeline, all forwards before all backwards, data parallel within a stage."""
    return Method("gpipe", num_stages, num_microbatches, (-1,), schedule="gpipe", data_axes=("x",), zero=0)


def pipeline(
    stages: Sequence[tuple[int, tuple[int, ...]]], num_microbatches: int | None = None, schedule: ScheduleName = "1f1b"
) -> Method:
    """A pipeline whose stages and meshes are fixed; shardings are free.

    Each of `stages` is a number of layers and the shape of a mesh. The forward pass is cut into as many layers of like
    work as all stages have together, and the cluster's devices are dealt out in order; once more in each further round
    of stages where `schedule` is "interleaved".

    Raises:
      PlanError: there are no stages, or one is not a number of layers and the shape of a mesh of up to three
        dimensions, all positive integers; or there is no such schedule.
    """
    if schedule not in schedule_names():
        raise PlanError(f"pipeline(schedule={schedule!r}): schedule must be one of {', '.join(schedule_names())}.")
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
