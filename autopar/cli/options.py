"""What is typed after a command, as nouns, and the options that commands share."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from autopar.cli.arguments import RECIPES, read_cluster, read_method
from autopar.cost_model.hardware import preset_names
from autopar.cost_model.targets import CPU, load_target, target_names
from autopar.errors import ArgumentError, UserError
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.plan import Plan


class Noun(click.ParamType):  # type: ignore[type-arg]  # generic in the newest only
    """A value that is read from text; what completes it is of `names`, or a file."""

    def __init__(self, name: str, read: Callable[[str], Any], names: Callable[[], Sequence[str]]) -> None:
        self.name, self._read, self._names = name, read, names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except UserError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self._names() if name.startswith(incomplete)]
        if names:
            return [CompletionItem(name) for name in names]
        return [CompletionItem(incomplete, type="file")]


def _chip(name: str) -> str:
    if name != CPU:
        load_target(name)
    return name


def _output(name: str) -> pathlib.Path:
    """A file that can be written, as far as can be told before there is anything to write."""
    path = pathlib.Path(os.path.realpath(name))
    if path.is_dir():
        raise ArgumentError(f"{name!r} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise ArgumentError(f"{name!r}: there is no folder {os.fspath(path.parent)!r}; make it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"{name!r}: the folder {os.fspath(path.parent)!r} cannot be written to; name another.")
    return path


CLUSTER = Noun("CLUSTER", read_cluster, preset_names)
METHOD = Noun("METHOD", read_method, lambda: tuple(RECIPES))
PLAN = Noun("FILE", Plan.load, tuple)
CHIP = Noun("CHIP", _chip, lambda: (*target_names(), CPU))
OUTPUT = Noun("FILE", _output, tuple)
cluster_option = click.option(
    "--cluster", type=CLUSTER,
    help=f"What to plan for: a preset ({', '.join(preset_names())}), with the number of hosts, dgx-h100:8, and of "
    "devices on each, dgx-h100:8x4; or a cluster file. Default: the step's own, or the devices at hand.",
)  # fmt: skip
_method_option = click.option(
    "--method", type=METHOD,
    help="auto, or a recipe with its arguments as in Python: 'zero(2)', 'megatron(2,4,1,8)', 'auto(num_stages=2)'. "
    "Default: the step's own, or auto.",
)  # fmt: skip
chip_option = click.option(
    "--target", "chip", type=CHIP,
    help=f"What to compile for: {', '.join(target_names())}, cpu, or a file with XLA's description of a chip. Default: "
    "the chips of the cluster.",
)  # fmt: skip
_plan_option = click.option(
    "--plan", "made", type=PLAN, help="Take the plan in this file, which names its cluster, instead of searching."
)


@dataclasses.dataclass(frozen=True)
class PlanSource:
    """Where a command takes its plan from: a search for a cluster by a method, or a file."""

    cluster: Cluster | None
    method: Method | None
    made: Plan | None

    def __post_init__(self) -> None:
        """Raises click.UsageError where one of these says what another does."""
        if self.made is not None and (self.cluster is not None or self.method is not None):
            name = "--cluster" if self.cluster is not None else "--method"
            raise click.UsageError(f"--plan and {name} exclude each other: the plan says it already. Leave out one.")

    @property
    def known(self) -> Cluster | None:
        """The cluster, where it is known before the step is loaded."""
        return self.cluster or (None if self.made is None else self.made.cluster)


def plan_source(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --cluster, --method and --plan to a command, which gets them as its `source`."""

    @cluster_option
    @_method_option
    @_plan_option
    @functools.wraps(command)
    def run(*args: Any, cluster: Cluster | None, method: Method | None, made: Plan | None, **options: Any) -> Any:
        return command(*args, source=PlanSource(cluster, method, made), **options)

    return run
