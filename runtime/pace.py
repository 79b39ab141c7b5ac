"""Whether a step has become slower, and which device or link of the job has."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from autopar.runtime import pulse
from autopar.runtime.processes import Processes
from autopar.runtime.pulse import Part, Readings

_LIKE = 3  # a part is held against the median of the others of its kind where there are so many
_SAYS = {
    "products": "products on device{s} {which}", "memory": "memory of device{s} {which}",
    "link": "the way{s} between devices {which}",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """A step that takes longer than it did.

    Attributes:
      function: the step's name.
      step: the number of the last step that was looked at.
      step_seconds: what a step takes now, without the time in `step.batches(..)` and in checkpoints.
      usual_seconds: what it took before.
      parts: what has become slower -> how many times as slow it is as before; empty: no device and no link. At the
        first look, what is slower than others of its kind -> how many times as slow it is as these.
      is_first: whether this is the first look, before which nothing is known.
      devices: of the job, in the order of the plan.
      hosts: the names of the hosts of its processes, in their order.
    """

    function: str
    step: int
    step_seconds: float
    usual_seconds: float
    parts: Mapping[Part, float]
    is_first: bool
    devices: tuple[jax.Device, ...] = dataclasses.field(repr=False)
    hosts: tuple[str, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        if self.is_first:
            return f"{self.function} {self.step}: slower than others of its kind: {'; '.join(self._runs())}."
        times = self.step_seconds / self.usual_seconds
        text = (
            f"{self.function} {self.step}: a step takes {times:.2f} times as long as it did "
            f"({1e3 * self.step_seconds:.4g} ms instead of {1e3 * self.usual_seconds:.4g})."
        )
        if self.parts:
            return f"{text} Slower than before: {'; '.join(self._runs())}."
        return (
            f"{text} No device and no link between neighbours is slower than before: see what else the program does "
            "between two steps, or profile the step."
        )

    def _runs(self) -> Iterator[str]:
        """Neighbours of one process that are slower in the same respect, together."""

        def key(part: Part) -> tuple[str, int, int]:
            ends = [part.device] + [part.device + 1] * (part.what == "link")
            owners = [self.devices[device].process_index for device in ends]
            return part.what, owners[0], owners[-1]

        for (what, first, last), run in itertools.groupby(sorted(self.parts, key=lambda p: (key(p), p.device)), key):
            parts = [*run]
            factors = [self.parts[part] for part in parts]
            numbers = [f"{p.device} and {p.device + 1}" if what == "link" else str(p.device) for p in parts]
            which = _SAYS[what].format(s="s" if len(parts) > 1 else "", which=", ".join(numbers))
            owners = f"process {first} on {self.hosts[first]}"
            if first != last:
                owners = f"processes {first} on {self.hosts[first]} and {last} on {self.hosts[last]}"
            yield f"{which} ({owners}), {max(factors):.1f} times as slow"


class Pace:
    """What a step takes, look by look; the same on all processes of a job, which look after the same steps."""

    def __init__(
        self, function: str, devices: Sequence[jax.Device], slower: float, job: Processes | None,
        measure: Callable[[Sequence[jax.Device], Processes | None], Readings] | None = None,
    ) -> None:  # fmt: skip
        """`slower`: so many times as slow is slower; `measure`: default `pulse.readings`."""
        self._function, self._devices, self._slower, self._job = function, tuple(devices), slower, job
        self._measure = measure or pulse.readings
        self._usual: float | None = None
        self._healthy: Readings = {}
        self._healthy_at = 0.0  # seconds of a step when these were measured
        self._told: float | None = None  # seconds of a step when the last slowdown was told
        self._slow_looks = 0  # one after the other, that have not been told

    def agreed(self, *seconds: float) -> list[float]:
        """Of each the longest that a process says."""
        if self._job is None:
            return [*seconds]
        said = self._job.combined(json.dumps(seconds), _longest, "to say how long a step takes")
        return [float(each) for each in json.loads(said)]

    def look(self, step: int, seconds: float) -> Slowdown | None:
        """Once the step is slower for a second look in a row, what has become slower.

        It is told again when it has become slower by as much again, or was as it used to be in between. At the first
        look the devices and links are measured, for comparison, and those are told that differ from their likes.

        Args:
          step: its number.
          seconds: of one, lately, as agreed.
        """
        if seconds <= 0:
            return None  # all of the time went to other things
        if self._usual is None:
            self._usual = self._healthy_at = seconds
            self._healthy = self._measure(self._devices, self._job)
            odd = self._slower_than_others()
            return self._slowdown(step, seconds, odd, is_first=True) if odd else None
        if self._slower * seconds <= self._healthy_at:  # something was slow at the first look
            better = self._measure(self._devices, self._job)
            self._healthy = {part: min(better.get(part, x), x) for part, x in self._healthy.items()}
            self._healthy_at = seconds
        self._usual = min(seconds, self._usual)
        if seconds < self._slower * self._usual:
            self._told = None
        is_slow = seconds >= self._slower * (self._told or self._usual)
        self._slow_looks = self._slow_looks + 1 if is_slow else 0
        if self._slow_looks < 2:
            return None
        self._told, self._slow_looks = seconds, 0
        now = self._measure(self._devices, self._job)
        factors = {part: now[part] / before for part, before in self._healthy.items() if part in now}
        return self._slowdown(step, seconds, {part: x for part, x in factors.items() if x >= self._slower})

    def _slowdown(
        self, step: int, seconds: float, parts: Mapping[Part, float], *, is_first: bool = False
    ) -> Slowdown:  # fmt: skip
        hosts = (platform.node(),) if self._job is None else self._job.hosts
        usual = seconds if self._usual is None else self._usual
        return Slowdown(self._function, step, seconds, usual, parts, is_first, self._devices, hosts)

    def _slower_than_others(self) -> dict[Part, float]:
        """By the median of the others of its kind. Virtual devices, which share the cores of a host, are of none."""
        kinds: dict[tuple[str, str, bool], dict[Part, float]] = defaultdict(dict)
        for part, seconds in self._healthy.items():
            device = self._devices[part.device]
            between = part.what == "link" and device.process_index != self._devices[part.device + 1].process_index
            if device.platform != "cpu":
                kinds[part.what, device.device_kind, between][part] = seconds
        found = {}
        for alike in kinds.values():
            for part, seconds in alike.items():
                others = [x for other, x in alike.items() if other != part]
                if len(others) >= _LIKE and seconds >= self._slower * statistics.median(others):
                    found[part] = seconds / statistics.median(others)
        return found


def _longest(texts: Sequence[str]) -> str:
    return json.dumps([max(each) for each in zip(*map(json.loads, texts), strict=True)])
