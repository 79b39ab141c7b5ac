"""A job whose processes are the workers of Ray Train, which starts them again where one is lost, as many as there are.

python examples/launch/ray_train.py /shared/folder --workers 2
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray.train
from ray.train.v2.jax import JaxTrainer

import autopar

WIDTH, EXAMPLES = 64, 32


def train_step(state: Any, batch: Any) -> Any:
    """Gradient descent on two layers; the state counts its steps."""

    def loss_of(params: Any) -> Any:
        return ((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params, "steps": state["steps"] + 1}, loss


def train(config: dict[str, Any]) -> None:
    """What every worker runs, from the latest checkpoint on, if there is one."""
    autopar.initialize(config["devices"])
    checkpoints = pathlib.Path(config["folder"], "checkpoints")
    numbers = np.random.default_rng(0)  # the same on all workers
    state: Any = {
        "params": {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for name in ("up", "down")},
        "steps": np.int32(0),
    }
    batch = {name: numbers.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
    step = autopar.parallelize(train_step).compile(state, batch)  # planned for the devices that there are this time
    if autopar.latest_step(checkpoints) is not None:
        state = autopar.restore(checkpoints, like=step)
    for at in range(int(state["steps"]) + 1, config["steps"] + 1):
        state, loss = step(state, batch)
        if at % config["every"] == 0:
            autopar.save(checkpoints, state, step=at)
            ray.train.report({"step": at, "loss": float(loss)})
            if jax.process_index() == 0:
                print(f"step {at}: loss {float(loss):.4f} of {jax.process_count()} processes", flush=True)
    autopar.wait_until_saved()  # Ray ends its workers as soon as they return from here


def main(words: Sequence[str] | None = None, loop: Callable[[dict[str, Any]], None] = train) -> None:
    """Start the workers, and wait for the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints and Ray's records; all hosts see it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=int, help="workers to go on with when hosts are lost; default: all")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker; 0: it trains on CPUs")
    parser.add_argument("--devices", type=int, help="virtual devices of each worker on CPUs; default: one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="so many steps a checkpoint is written")
    arguments = parser.parse_args(words)
    folder = os.path.abspath(arguments.folder)
    trainer = JaxTrainer(
        loop,
        train_loop_config={**vars(arguments), "folder": folder},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(arguments.least or arguments.workers, arguments.workers), use_gpu=arguments.gpus > 0,
            resources_per_worker={"GPU": arguments.gpus} if arguments.gpus else {"CPU": 1},
        ),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main()
