"""A cluster as a profile has found it: `autopar calibrate --from-profile`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from autopar.cost_model.slowed import Factors, changed, slower_kind, slower_link
from autopar.errors import ClusterError
from autopar.ir.cluster_json import cluster_data, parse_cluster
from autopar.ir.json_file import read_path
from autopar.ir.mesh import Cluster
from autopar.ir.plan_text import render

_REMEDY = "It has to be what `autopar profile TARGET --kernels --json` prints, or profile.to_json() with kernels=True."
_COUNTS = 0.01  # of all kernels' seconds, for a kind of operators to be fitted by


@dataclasses.dataclass(frozen=True)
class ProfiledCluster:
    """A cluster whose speeds are those of a profiled step.

    Attributes:
      cluster: what plans are to be made with.
      factors: by kind of operator, and of "transfers", the seconds measured over those predicted before.
    """

    cluster: Cluster
    factors: Mapping[str, float]

    def __str__(self) -> str:
        table = Table("what", "measured / predicted before", title="By the profile", title_justify="left")
        for kind, factor in self.factors.items():
            table.add_row(kind, f"{factor:.2f}")
        return f"{render([table])}\n{self.cluster}"

    def to_json(self) -> str:
        """Both."""
        return json.dumps({"factors": dict(self.factors), "cluster": cluster_data(self.cluster)}, indent=2)


def cluster_from_profile(path: str | os.PathLike[str]) -> ProfiledCluster:
    """The cluster that a profiled step was planned for, with the speeds at which its kernels and transfers ran.

    Products, convolutions, fused attention, memory traffic, and collectives or, without these, transfers each get one
    factor. What the step had none of stays as it was. Nothing gets quicker than its peak by the cluster's description.

    Raises:
      ClusterError: the file is no profile with kernels.
    """
    where = f"profile {os.fspath(path)!r}"
    text = read_path(path, "profile", ClusterError)
    try:
        content = json.loads(text)
        if content["format"] != "autopar-profile" or not content["kernels"]:
            raise KeyError("kernels")
        described, factors = content["described"], _factors(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{where}: it holds no kernels ({error}). {_REMEDY}") from error
    cluster = parse_cluster(json.dumps(described), where)
    return ProfiledCluster(_fitted(cluster, factors), factors)


def _factors(content: Mapping[str, Any]) -> dict[str, float]:
    whole = sum(row["measured"] for row in content["kernels"])
    found = {
        row["kind"]: row["measured"] / row["predicted"]
        for row in content["kernels"] if row["predicted"] > 0 and row["measured"] > _COUNTS * whole
    }  # fmt: skip
    copies = [row for row in content["rows"] if row["to"] is not None and row["predicted"]]
    if copies:
        found["transfers"] = sum(row["measured"] for row in copies) / sum(row["predicted"] for row in copies)
    return found


def _fitted(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    kinds = ("products", "convolutions", "attention", "memory")
    by = Factors(**{kind: factors[kind] for kind in kinds if kind in factors})
    sent = factors.get("collectives", factors.get("transfers", 1.0))
    fitted = changed(cluster, lambda kind: slower_kind(kind, by), lambda link: slower_link(link, sent, sent))
    network = slower_link(cluster.network, sent, sent) if len(cluster.hosts) > 1 else cluster.network
    return dataclasses.replace(fitted, name=f"{cluster.name}, profiled", network=network)
