"""The chips that XLA can compile for where none is: its descriptions of them (`data/targets/*.txtpb`)."""

from __future__ import annotations

import importlib.resources
import pathlib
import re
from importlib.resources.abc import Traversable

from autopar.errors import TargetError
from autopar.ir.json_file import nearest
from autopar.ir.mesh import DeviceKind

CPU = "cpu"

# What the names of device kinds have in them, and the target; the first that fits.
_CHIPS = (
    (r"\bcpu\b", CPU),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"A100.*40GB", "a100-40gb"),
    (r"A100", "a100"),
    (r"V100", "v100"),
)


def _folder() -> Traversable:
    return importlib.resources.files("autopar.cost_model") / "data" / "targets"


def target_names() -> tuple[str, ...]:
    """The names that `load_target` knows, sorted, besides "cpu"."""
    names = (file.name for file in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".txtpb") for name in names if name.endswith(".txtpb")))


def load_target(name: str) -> str:
    """XLA's description of a chip as text: of one of `target_names`, or from a file.

    Such a file is written on a machine with the chip by XLA_FLAGS=--xla_dump_to=FOLDER: any program that is compiled
    then leaves a `…gpu_target_config.pbtxt` in the folder.

    Raises:
      TargetError: there is neither.
    """
    if name in target_names():
        return (_folder() / f"{name}.txtpb").read_text()
    try:
        return pathlib.Path(name).read_text()
    except OSError as error:
        raise TargetError(
            f"target={name!r}: there is no such target, nor such a file ({error.strerror}); "
            f"{nearest(name, (*target_names(), CPU))}targets are {', '.join((*target_names(), CPU))}."
        ) from error


def target_of(kind: DeviceKind) -> str:
    """The target of a device kind of a cluster.

    Raises:
      TargetError: its name is of no chip that is known.
    """
    for pattern, name in _CHIPS:
        if re.search(pattern, kind.name, re.IGNORECASE):
            return name
    raise TargetError(
        f"the name of device kind {kind.name!r} is of no chip that is known: give target=, one of "
        f"{', '.join((*target_names(), CPU))}, or a file with XLA's description of the chip."
    )
