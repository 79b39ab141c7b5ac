"""`examples/launch/ray_train.py` on a Ray of two hosts, one of which is lost: `ray_job.py FOLDER`."""

from __future__ import annotations

import pathlib
import sys
import threading
import time
from typing import Any

import pytest
import ray
import ray.train
from ray.cluster_utils import Cluster

import autopar
from autopar.errors import ArgumentError
from autopar.runtime import launcher
from examples.launch import ray_train

STOPS = "stops"  # the file that says that a checkpoint is complete after which a host is lost


def train(config: dict[str, Any]) -> None:
    """As the example; once the checkpoint of step 10 is complete, the workers wait to be lost."""
    if ray.train.get_context().get_world_size() == 2:
        with pytest.raises(ArgumentError, match=r"worker \d of 2 of Ray Train and has not joined the others, so that"):
            launcher.check_joined()
    stops = pathlib.Path(config["folder"], STOPS)

    def save(path: Any, state: Any, *, step: int) -> bool:
        done = original(path, state, step=step)
        if step == 10:
            autopar.wait_until_saved()
            stops.touch()
            time.sleep(600)
        return done

    original = autopar.save
    setattr(autopar, "save", save)  # noqa: B010
    ray_train.train(config)


def main(folder: str) -> None:
    """The hosts are processes of this machine with one CPU each; the second is lost."""
    hosts = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = hosts.add_node(num_cpus=1)
    hosts.wait_for_nodes()
    ray.init(address=hosts.address)
    stops = pathlib.Path(folder, STOPS)

    def lose() -> None:
        while not stops.exists():
            time.sleep(0.1)
        hosts.remove_node(second, allow_graceful=False)

    threading.Thread(target=lose, daemon=True).start()
    try:
        ray_train.main([folder, "--workers", "2", "--least", "1"], train)
    finally:
        ray.shutdown()
        hosts.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
