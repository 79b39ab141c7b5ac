"""autopar: an auto-parallelizing compiler for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar import metrics, recipes, sharding_rules
from autopar.api import Parallelized, parallelize
from autopar.calibration.calibrator import calibrate
from autopar.cost_model.hardware import cluster_from_devices, load_preset, make_cluster, preset_names
from autopar.debugging import debug
from autopar.errors import AutoparError, InternalError, UserError
from autopar.executable import Executable
from autopar.ir.calibration import Calibration
from autopar.ir.cluster_json import cluster_from_json, cluster_to_json
from autopar.ir.graph import Graph
from autopar.ir.hint import hint
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Measured, XlaBackend
from autopar.ir.method import Method
from autopar.ir.pieces import Pieces
from autopar.ir.plan import Plan
from autopar.ir.schedule import register_schedule
from autopar.ir.why import Alternative, Why
from autopar.metrics import meter
from autopar.ops.attention import dot_product_attention
from autopar.passes.rules.table import register_sharding_rule
from autopar.planned import Planned
from autopar.reporting.report import Report
from autopar.runtime.launcher import initialize
from autopar.runtime.pace import Slowdown
from autopar.stages import Traced
from autopar.state import gather
from autopar.watching import watch

if TYPE_CHECKING:
    from autopar.checkpointing.checkpoints import latest_step, restore, save, wait_until_saved

__all__ = [
    "Alternative",
    "AutoparError",
    "Calibration",
    "Cluster",
    "DeviceKind",
    "Executable",
    "Graph",
    "Host",
    "InternalError",
    "Link",
    "Measured",
    "Method",
    "Parallelized",
    "Pieces",
    "Plan",
    "Planned",
    "Report",
    "Slowdown",
    "Traced",
    "UserError",
    "Why",
    "XlaBackend",
    "calibrate",
    "cluster_from_devices",
    "cluster_from_json",
    "cluster_to_json",
    "debug",
    "dot_product_attention",
    "gather",
    "hint",
    "initialize",
    "latest_step",
    "load_preset",
    "make_cluster",
    "meter",
    "metrics",
    "parallelize",
    "preset_names",
    "recipes",
    "register_schedule",
    "register_sharding_rule",
    "restore",
    "save",
    "sharding_rules",
    "wait_until_saved",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Checkpoints are imported when they are first used: they need packages that not everyone has."""
    if name not in ("latest_step", "restore", "save", "wait_until_saved"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from autopar.checkpointing import checkpoints
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"autopar.{name} needs {error.name}, which is not here: pip install 'autopar[checkpoint]'"
        ) from error
    return getattr(checkpoints, name)
