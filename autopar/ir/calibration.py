"""What a machine was measured to do, and how well the cost model says so."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from autopar.errors import ClusterError
from autopar.ir.cluster_json import cluster_data, cluster_to_json
from autopar.ir.json_file import write_path
from autopar.ir.mesh import Cluster
from autopar.ir.plan_text import render
from autopar.ir.units import count_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One probe: a small program on some of the devices of a host."""

    group: str  # of probes that say the same thing about the machine
    name: str
    num_devices: int  # on which it ran at once
    seconds: float
    predicted: float  # seconds, by the calibrated cost model; of products and steps without this one's part in it

    @property
    def error(self) -> float:
        """Relative, of the prediction."""
        return self.predicted / self.seconds - 1.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A machine as it was measured. `print(calibration)` says how well the cost model fits it."""

    cluster: Cluster
    measurements: tuple[Measurement, ...]
    seconds: float  # that measuring took
    left_out: int  # probes that there was no time for
    sources: Mapping[str, str]  # what the numbers of the cluster that were not measured are from

    def errors(self) -> dict[str, tuple[int, float, float]]:
        """Of each group of probes: how many, median and largest absolute relative error."""
        groups: dict[str, list[float]] = {}
        for each in self.measurements:
            groups.setdefault(each.group, []).append(abs(each.error))
        return {group: (len(errors), statistics.median(errors), max(errors)) for group, errors in groups.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster file, whole or not at all.

        Raises:
          ClusterError: the file cannot be written.
        """
        write_path(path, cluster_to_json(self.cluster), "cluster file", ClusterError)

    def to_json(self) -> str:
        """All of it, as JSON."""
        content = {
            "format": "autopar-calibration", "version": 1, "cluster": cluster_data(self.cluster),
            "seconds": self.seconds, "left_out": self.left_out, "not_measured": dict(self.sources),
            "measurements": [dataclasses.asdict(each) for each in self.measurements],
        }  # fmt: skip
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        return render(self._parts())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def _parts(self) -> Sequence[RenderableType]:
        table = _table("measured", "probes", "median error", "largest error")
        for group, (count, median, largest) in self.errors().items():
            table.add_row(group, str(count), f"{median:.1%}", f"{largest:.1%}")
        took = f"{count_text(len(self.measurements), 'probe')} in {seconds_text(self.seconds)}"
        late = f"; no time for {self.left_out} more" if self.left_out else ""
        worst = sorted(self.measurements, key=lambda each: -abs(each.error))[:5]
        farthest = _table("farthest off", "devices", "measured", "predicted")
        for each in worst:
            times = seconds_text(each.seconds), seconds_text(each.predicted)
            farthest.add_row(f"{each.group}: {each.name}", str(each.num_devices), *times)
        kept = [Text(f"not measured: {what}, {source}") for what, source in self.sources.items()]
        return [
            Text(str(self.cluster)), Text(), Text(f"{took}{late}. Predicted from the others (products, steps), or as "
            "fitted to it (the rest):"), table, Text(),
            farthest, *([Text(), *kept] if kept else []),
        ]  # fmt: skip


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for header in others:
        table.add_column(header, justify="right")
    return table
