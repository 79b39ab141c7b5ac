"""What a plan may look like: the planner's freedom, or a recipe that takes some of it away."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from autopar.ir.schedule import ScheduleName


@dataclasses.dataclass(frozen=True)
class StageMethod:
    """A stage that is fixed, on the devices that follow those of the stage before."""

    num_layers: int  # of the step's layers, which are as many as all stages have
    mesh_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Method:
    """Fixes parts of a plan; None leaves a part to the search.

    Everything that is not fixed is found by the same solver and priced by the same cost model, whatever the method.
    """

    name: str
    num_stages: int | None = None
    num_microbatches: int | None = None
    mesh_shape: tuple[int, ...] | None = None  # logical shape of every stage's mesh, (-1,) for one axis; x, y
    stages: tuple[StageMethod, ...] | None = None  # each on its own; num_stages is their number, without mesh_shape
    schedule: ScheduleName | None = None
    data_axes: tuple[str, ...] = ()  # axes that split examples and nothing else
    model_axes: tuple[str, ...] = ()  # axes that split anything but examples
    # What model axes cut along sequences, and whatever else tells the elements of an example apart in the batch: True,
    # what is between products, which they cut otherwise (Korthikanti et al. 2022); False, nothing, and over these axes
    # values are only summed (Shoeybi et al. 2019). None: what is best.
    sequence_parallel: bool | None = None
    # Over the data axes: 0 replicates all state, 1 shards the optimizer state, 2 also the accumulated gradients,
    # 3 also the parameters (Rajbhandari et al. 2020). None: as the solver finds best.
    zero: int | None = None
    spatial: bool = True  # whether convolutions may be cut along their windows
    min_stages: int = 1
    remat: bool | None = None  # True: nothing is kept of a block for the backward pass; False: all is, as the step says
    # Whose time the sharding within a stage minimizes: a step's, or one microbatch's and all that is done once a step,
    # as Alpa's solver did.
    objective: Literal["step", "microbatch"] = "step"
    axes: tuple[str, ...] = ()  # that have several devices in every stage's mesh
    memory_limit: int | None = None  # bytes per device, where that is less than the cluster has
    time_limit: float | None = None  # seconds after which the search ends with the best plan that it has
    baselines: bool = False  # whether recipes are planned beside the search, and win where they are quicker
    without: frozenset[str] = frozenset()  # neighbours and other parts of the search that it does without, by name
    options: tuple[tuple[str, Any], ...] = ()  # of `recipes.auto`, as the user gave them

    def __post_init__(self) -> None:
        if self.stages is not None:
            object.__setattr__(self, "num_stages", len(self.stages))

    @property
    def excluding_options(self) -> dict[str, Any]:
        """The options given by the user that exclude plans: all but those of the search itself."""
        return {name: value for name, value in self.options if name not in ("time_limit", "baselines")}

    def has(self, part: str) -> bool:
        """Whether the search does what is called so: see `autopar.planning.neighbours` and `parts`."""
        return part not in self.without

    def allows(self, recipe: Method) -> bool:
        """Whether a recipe does what this fixes."""
        axes = set("x" if recipe.mesh_shape == (-1,) else "xy")
        return (
            self.stages is None
            and self.num_stages in (None, recipe.num_stages)
            and self.min_stages <= (recipe.num_stages or 1)
            and self.mesh_shape in (None, recipe.mesh_shape)
            and self.zero in (None, recipe.zero)
            and axes.issuperset(self.axes)
            and axes.intersection(self.data_axes) <= set(recipe.data_axes)
            and axes.intersection(self.model_axes) <= set(recipe.model_axes)
        )

    def within(self, method: Method) -> Method:
        """This recipe with what it leaves open as another method has it."""
        schedule = method.schedule or self.schedule
        axes = self.data_axes[:1] if method.mesh_shape == (-1,) else self.data_axes  # where one axis is fixed
        return dataclasses.replace(
            self, memory_limit=method.memory_limit, schedule=schedule, spatial=method.spatial, data_axes=axes
        )

    def data_shards(self, num_devices: int) -> int:
        """Into how many pieces a recipe cuts each microbatch; 1 where it leaves that to the solver."""
        if self.mesh_shape is None:
            return 1
        shape = self.mesh_shape if self.mesh_shape != (-1,) else (num_devices // (self.num_stages or 1),)
        return math.prod(n for n, axis in zip(shape, "xyz", strict=False) if axis in self.data_axes)


def data_shape(size: int) -> tuple[int, ...]:
    """The mesh of so many devices over which state is sharded that splits most arrays into as many pieces.

    Sizes of arrays have many factors of two and few others: an odd number, which may divide another dimension than a
    power of two does, or none, gets an axis of its own.

    >>> data_shape(64), data_shape(48), data_shape(7)
    ((64,), (3, 16), (7,))
    """
    power = size & -size
    return (size // power, power) if 1 < power < size else (size,)


AUTO = Method("auto", baselines=True)
