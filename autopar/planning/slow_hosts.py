"""Hosts that were found to be slow, remembered from one start of a job to the next."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.cost_model.slowed import Slowness, slowed_hosts
from autopar.errors import ArgumentError
from autopar.ir.mesh import Cluster
from autopar.planning.plan_cache import FOLDER
from autopar.runtime.local_job import WHEN_SLOWER, cache_folder
from autopar.runtime.pulse import Part

if TYPE_CHECKING:
    import jax

_FILE = "slow-hosts.json"
_REMEMBERED = 24 * 3600.0  # seconds: it may have been mended since
_DIGITS = 2  # of the factors, so that the next start plans for the same cluster


class _Known(NamedTuple):
    hosts: Mapping[str, Slowness]
    network: float


_planned_for = [_Known({}, 1.0)]  # by this program: what had been remembered


def when_slower() -> float | None:
    """How many times as long a step has to take for the job to be planned anew; None: it is not.

    Raises:
      ArgumentError: the variable holds no number above 1.
    """
    text = os.environ.get(WHEN_SLOWER)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if float(text) > 1:
            return float(text)
    raise ArgumentError(f"{WHEN_SLOWER}={text!r} is no number above 1, such as 1.2.")


def of_hosts(
    cluster: Cluster, devices: Sequence[jax.Device], names: Sequence[str], slow: Mapping[Part, float]
) -> tuple[dict[str, Slowness], float]:
    """What is slow of each named host, and of the network between them.

    Args:
      devices: of the job, those of the cluster in its order.
      names: of the hosts of the processes.
      slow: how many times as slow parts are.
    """
    found: dict[str, Slowness] = {}
    network = 1.0
    for (what, device), exact in slow.items():
        factor = round(exact, _DIGITS)
        if what == "link" and cluster.host_of(device) != cluster.host_of(device + 1):
            network = max(network, factor)
            continue
        name = names[devices[device].process_index]
        before = found.get(name, Slowness())
        found[name] = before._replace(**{what: max(factor, getattr(before, what))})
    return found, network


def remember(hosts: Mapping[str, Slowness], network: float) -> None:
    """For the next start, on these hosts, beside what is known of others.

    What this program has planned for already was as slow before: the factors multiply.

    Raises:
      OSError: it cannot be written.
    """
    known = _read()
    for name, slow in hosts.items():
        before = _planned_for[-1].hosts.get(name, Slowness())
        both = Slowness(*(round(a * b, _DIGITS) for a, b in zip(before, slow, strict=True)))
        known["hosts"][name] = {"slow": both._asdict(), "at": time.time()}
    if network > 1:
        known["network"] = {"slow": round(network * _planned_for[-1].network, _DIGITS), "at": time.time()}
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(known, indent=1))
    written.replace(path)


def as_remembered(cluster: Cluster, devices: Sequence[jax.Device], names: Sequence[str]) -> Cluster:
    """The cluster with its hosts as slow as they were found to be, where jobs are planned anew."""
    if when_slower() is None or not _path().exists() or len(devices) < cluster.num_devices:
        return cluster
    known = _read()
    hosts = {name: Slowness(**each["slow"]) for name, each in known["hosts"].items()}
    _planned_for[:] = [_Known(hosts, known["network"]["slow"])]
    return with_slow(cluster, devices, names, *_planned_for[-1])


def with_slow(
    cluster: Cluster, devices: Sequence[jax.Device], names: Sequence[str], hosts: Mapping[str, Slowness],
    network: float,
) -> Cluster:  # fmt: skip
    """The cluster with named hosts, and the network, so slow; see `of_hosts`.

    Of a host of the cluster that is several machines, behind one fast interconnect, the slowest counts.
    """
    slow = []
    for start, stop in itertools.pairwise(cluster.host_bounds):
        machines = {names[device.process_index] for device in devices[start:stop]}
        of_each = [hosts.get(name, Slowness()) for name in machines]
        slow.append(Slowness(*map(max, zip(*of_each, strict=True))))
    return slowed_hosts(cluster, slow, network)


def _path() -> pathlib.Path:
    folder = os.environ.get(FOLDER)
    return (pathlib.Path(folder).expanduser() if folder else cache_folder() / "plans") / _FILE


def _read() -> dict[str, Any]:
    """What was found lately; a file that cannot be read is none."""
    known: dict[str, Any] = {"hosts": {}, "network": {"slow": 1.0, "at": 0.0}}
    since = time.time() - _REMEMBERED
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        read = json.loads(_path().read_text())
        hosts = {name: each for name, each in read["hosts"].items() if each["at"] > since and Slowness(**each["slow"])}
        network = read["network"]
        known = {"hosts": hosts, "network": network if network["at"] > since else known["network"]}
    return known
