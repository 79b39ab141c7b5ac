"""What the search for a plan may try: numbers of microbatches, equal stages, rounds, shapes of meshes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.errors import PlanError
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import data_shape
from autopar.ir.plan import Plan
from autopar.ir.schedule import make_schedule
from autopar.ir.units import count_text
from autopar.passes.submeshes import candidate_shapes, mesh_at
from autopar.planning.candidate import groups_of
from autopar.planning.layering import MAX_LAYERS, Layering

_MOST_STAGES = 64  # that are tried
_ROUNDS = (2, 3, 4)  # of interleaved stages
_WORTH_INTERLEAVING = 0.02  # of the step time that it saves: more transfers take a part of it
_MOST_PARTS = 128  # stages of all rounds


class SearchSpace:
    """What may be tried for one traced step on one cluster, within a method's freedom."""

    def __init__(self, layering: Layering) -> None:
        self.layering = layering
        self.analysis, self.cluster, self.method = layering.analysis, layering.cluster, layering.method

    @property
    def may_be_one_stage(self) -> bool:
        """Whether the method allows plans of one stage."""
        return self.method.num_stages in (None, 1) and self.method.min_stages == 1

    @property
    def may_be_a_pipeline(self) -> bool:
        """Whether the method and the cluster allow plans of several stages."""
        return self.cluster.num_devices > 1 and self.method.num_stages != 1

    @property
    def may_choose_the_schedule(self) -> bool:
        """Whether the method leaves it open."""
        return self.method.schedule is None

    @functools.cached_property
    def likely(self) -> list[int]:
        """Numbers of microbatches of which a pipeline has one, probably, rising."""
        # With as many stages as there may be, a microbatch has an example for each host of a stage.
        most = min(8 * self.cluster.num_devices, MAX_LAYERS * self.analysis.batch_size // len(self.cluster.hosts))
        numbers = [m for m in self.many if m <= most] or self.many[-1:]
        return numbers[:2][::-1]

    @functools.cached_property
    def divisors(self) -> list[int]:
        """Numbers of microbatches above 1 that the batch can be cut into, and each of them over the data shards."""
        most, shards = self.analysis.most_microbatches, self.method.data_shards(self.cluster.num_devices)
        return [m for m in range(2, most + 1) if most % m == 0 and self.analysis.batch_size % (m * shards) == 0]

    @functools.cached_property
    def many(self) -> list[int]:
        """Numbers of microbatches where few do not fit, each about half of that before: the least memory first.

        And of those that give every device whole parts of the batch, where these are several examples: what is
        computed of a part, as a norm of it is, then needs no communication.
        """
        return sorted({*_about_doubling(self.divisors), *_about_doubling(self.whole)}, reverse=True)

    @functools.cached_property
    def whole(self) -> list[int]:
        """Numbers of microbatches above 1 that give every device whole parts of the batch, rising."""
        return [m for m in self.divisors if self.analysis.most_microbatches % (m * self.cluster.num_devices) == 0]

    @property
    def more(self) -> list[int]:
        """Numbers of microbatches above those that are likely, rising: the first that fits is about the best."""
        return [m for m in self.many[::-1] if m > self.likely[-1]]

    def dividing(self, m: int) -> Iterator[int]:
        """A number of microbatches and others, falling, each of which divides the one before by as little as it can."""
        yield m
        while (fewer := next((n for n in self.divisors[::-1] if n < m and m % n == 0), None)) is not None:
            yield (m := fewer)

    def fewer(self, plan: Plan) -> int | None:
        """A number of microbatches below the plan's: of one stage, the least for which there is memory as it is.

        Of several stages, or if there is none, the next: other shardings, or what is computed again, may need less.
        """
        m = plan.num_microbatches
        numbers = [n for n in self.many if n < m]
        if len(plan.stages) == 1:
            memory = plan.stages[0].memory
            growing = memory.activations + memory.temporaries
            numbers = [n for n in numbers[::-1] if memory.total + (m / n - 1) * growing <= memory.capacity] or numbers
        return numbers[0] if numbers else None

    def rounds(self, stages: int, m: int, unevenness: float = 0.0) -> Sequence[int]:
        """Numbers of rounds that may be worth it for so many stages, rising.

        Those of which each stage has as many layers of the loops over layers, if any. What they save is a part of the
        bubble, and of the time that the other stages wait for the slowest: `unevenness` is its share of the step.
        """
        if not self.may_choose_the_schedule or m % stages:
            return ()
        lengths = self.layering.stacks.lengths
        even = [n for n in range(2, _MOST_PARTS // stages + 1) if all(length % (n * stages) == 0 for length in lengths)]
        numbers = even[: len(_ROUNDS)] if lengths and even else _ROUNDS
        bubble = (stages - 1) / (m + stages - 1)
        saved = {n: (1 - 1 / n) * bubble + unevenness for n in numbers if n * stages <= _MOST_PARTS}
        return [n for n, share in saved.items() if share >= _WORTH_INTERLEAVING]

    def uniform(self, fixed: int | None) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Numbers of equal stages that the search cannot make of the layers that it tells apart, the likely ones first.

        With their meshes' shape and a number of microbatches: `fixed`, if it is.
        """
        hosts, method = self.cluster.hosts, self.method
        if len(hosts) == 1 or len(set(hosts)) > 1 or not self.divisors:
            return
        if method.num_stages is not None or method.mesh_shape is not None or method.axes:
            return
        yield from self._of_hosts(fixed) if len(hosts) > MAX_LAYERS else self._of_parts_of_hosts(fixed)

    def _of_hosts(self, fixed: int | None) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Stages of as many whole hosts each, falling: first numbers that divide the loops over layers, then others."""
        count, width = len(self.cluster.hosts), self.cluster.hosts[0].num_devices
        lengths = self.layering.stacks.lengths

        def divides(n: int) -> bool:
            return all(length % n == 0 for length in lengths)

        many = [n for n in range(_MOST_STAGES, MAX_LAYERS, -1) if count % n == 0]
        few = [n for n in range(MAX_LAYERS, 1, -1) if count % n == 0 and divides(n)]
        for stages in sorted((*many, *few), key=divides, reverse=True):
            each = count // stages  # and of a microbatch's examples, so that each host has one
            m = fixed or max((n for n in self.divisors if n * each <= self.analysis.batch_size), default=1)
            if stages > MAX_LAYERS or m > 1:  # one microbatch leaves nothing to overlap
                yield stages, (each, width) if each > 1 else (width,), m

    def _of_parts_of_hosts(self, fixed: int | None) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Stages of an equal part of a host each."""
        count, width = len(self.cluster.hosts), self.cluster.hosts[0].num_devices
        m = fixed or self.likely[-1]
        # They are about the same in any number of microbatches; in one, most steps are in layers already, loops whole.
        layers = self.layering.layered(fixed or (self.likely[0] if self.layering.cuts_loops else 1), True).num_layers
        for parts in (n for n in range(2, width + 1) if width % n == 0 and n * count < layers):
            if layers % (parts * count):
                yield parts * count, (width // parts,), m

    def fixed_stages(self) -> list[tuple[tuple[int, int], Mesh]]:
        """As the method has them. Raises PlanError where the cluster's devices cannot be dealt out so."""
        stages: list[tuple[tuple[int, int], Mesh]] = []
        layer = device = 0
        interleaved = self.method.schedule == "interleaved"
        for at, stage in enumerate(self.method.stages or ()):
            if interleaved and device == self.cluster.num_devices:
                device = 0  # the next round
            size = math.prod(stage.mesh_shape)
            if not candidate_shapes(self.cluster, device, size):
                raise PlanError(
                    f"method {self.method.name!r}: stage {at} of mesh shape {stage.mesh_shape} would have the devices "
                    f"{device} to {device + size - 1} of cluster {self.cluster.name!r}; a stage must have whole hosts, "
                    "or lie in one host and have a power of two or a divisor of its devices."
                )
            stages.append(((layer, layer + stage.num_layers), mesh_at(device, stage.mesh_shape)))
            layer, device = layer + stage.num_layers, device + size
        if device != self.cluster.num_devices:
            raise PlanError(
                f"method {self.method.name!r}: its stages have {count_text(device, 'device')}, cluster "
                f"{self.cluster.name!r} has {self.cluster.num_devices}; choose mesh shapes that have them all."
            )
        groups = len({mesh.devices for _, mesh in stages})
        if len(stages) % groups or any(mesh != stages[at % groups][1] for at, (_, mesh) in enumerate(stages)):
            raise PlanError(
                f"method {self.method.name!r}: each round of interleaved stages must have the mesh shapes of the first."
            )
        return stages

    @property
    def first_meshes(self) -> list[Mesh]:
        """All devices in each of their first shapes."""
        number = self.cluster.num_devices
        return [mesh_at(0, shape) for shape in self.first_shapes(self.cluster, 0, number)]

    def first_shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        """Those of one axis of several devices, and of several hosts that of hosts x width.

        All of them, where the method has none such.
        """
        width = cluster.hosts[cluster.host_of(start)].num_devices
        shapes = self.shapes(cluster, start, size)
        return tuple(s for s in shapes if 1 in s or len(s) == 1 or s[1] == width) or shapes

    def shapes_of_hosts(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        """The same of whole hosts, each by itself."""
        is_host = (start, start + size) in itertools.pairwise(cluster.host_bounds)
        return self.first_shapes(cluster, start, size) if is_host else ()

    def shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        shape = self.method.mesh_shape
        shapes = candidate_shapes(cluster, start, size)
        if shape is None:
            if shapes and "y" in self.method.model_axes and "x" not in self.method.model_axes:
                shapes = (*shapes, (1, size))  # all of them along y
            forced = self.method.axes
            return tuple(s for s in shapes if {a for a, n in zip("xyz", s, strict=False) if n > 1}.issuperset(forced))
        if shape == (-1,):
            shape = data_shape(size) if self.method.zero and "y" in self.method.data_axes else (size,)
        return (shape,) if shapes and math.prod(shape) == size else ()


def _about_doubling(numbers: Sequence[int]) -> Iterator[int]:
    """The least of rising numbers that is not below 2, 4, 8, ..

    >>> [*_about_doubling([2, 3, 4, 6, 8, 12, 24])]
    [2, 4, 8, 24]
    """
    for k in range(1, max(numbers, default=0).bit_length()):
        yield min(n for n in numbers if n >= 1 << k)


def has_room(plan: Plan, rounds: int) -> bool:
    """Whether there is memory for the microbatches in flight of so many rounds, if shardings stay as they are."""
    groups = len(groups_of(plan))
    before = make_schedule(plan.schedule, len(plan.stages), plan.num_microbatches, groups)
    after = make_schedule("interleaved", rounds * groups, plan.num_microbatches, groups)
    for group in range(groups):
        parts = plan.stages[group::groups]
        now = sum(before.in_flight(group + i * groups) for i in range(len(parts))) / len(parts)
        then = sum(after.in_flight(group + i * groups) for i in range(rounds)) / rounds
        activations = sum(part.memory.activations for part in parts)
        if parts[0].memory.total + (then / now - 1) * activations > parts[0].memory.capacity:
            return False
    return True
