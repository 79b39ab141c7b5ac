"""Measured seconds per step beside the predicted ones."""

from __future__ import annotations

import dataclasses
import json
import statistics

from autopar.ir.units import count_text, seconds_text


@dataclasses.dataclass(frozen=True)
class Timing:
    """A planned step that was run."""

    function: str
    method: str
    cluster: str  # that the step was planned for
    device_kind: str  # that it ran on
    num_devices: int
    predicted: float  # seconds per step
    seconds: tuple[float, ...]  # of each step, after those that warm up

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)

    def to_json(self) -> str:
        """All of it, as JSON."""
        content = {"format": "autopar-timing", "version": 1, **dataclasses.asdict(self), "median": self.median}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        return (
            f"{self.function} by method {self.method} on {count_text(self.num_devices, 'device')} of kind "
            f"{self.device_kind}\n"
            f"measured   {seconds_text(self.median)} per step: the median of {count_text(len(self.seconds), 'step')}, "
            f"{seconds_text(min(self.seconds))} to {seconds_text(max(self.seconds))}\n"
            f"predicted  {seconds_text(self.predicted)} per step for cluster {self.cluster}: "
            f"{self.predicted / self.median:.2f} times the measured"
        )
