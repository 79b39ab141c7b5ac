"""A small training script, and what can go wrong in it: `small.py [WHAT [PROCESS]]`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WHAT = sys.argv[1] if len(sys.argv) > 1 else "nothing"
IS_ODD = len(sys.argv) > 2 and jax.process_index() == int(sys.argv[2])
WIDTH = 16 if not (WHAT == "shapes" and IS_ODD) else 32


def train_step(state, batch):  # type: ignore[no-untyped-def]
    def loss_of(params):  # type: ignore[no-untyped-def]
        hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])
        jax.debug.print("mean {}", hidden.mean())
        return ((hidden @ params["c"] - batch["y"]) ** 2).mean()

    if WHAT == "code" and IS_ODD:
        state = {**state, "params": jax.tree.map(lambda p: 2 * p, state["params"])}
    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    noise = jax.random.normal(state["key"], ())
    return {"params": params, "count": state["count"] + 1, "key": jax.random.split(state["key"])[0]}, (loss, noise)


devices = jax.device_count()
method = autopar.recipes.gpipe(2 if WHAT != "stages" else 64, 2) if devices > 1 else "auto"
step = autopar.parallelize(train_step, method=method)
if WHAT == "devices":
    step = autopar.parallelize(train_step, cluster=autopar.load_preset("dgx-h100"))
numbers = np.random.default_rng(0)
params: Any = {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.2 for name in "abc"}
state: Any = {"params": params, "count": 0, "key": jax.random.key(3)}
batch = {name: numbers.normal(size=(8, WIDTH)).astype(np.float32) for name in "xy"}
for _ in range(3):
    state, (loss, noise) = step(state, batch)
    print(f"step {int(state['count'])}: {float(loss):.6f} {float(noise):.6f}", flush=True)
if WHAT == "raise" and IS_ODD:
    raise ValueError("the disk is full")
if WHAT == "nan":
    with jax.debug_nans(True):
        step(state, {**batch, "y": batch["y"] * np.nan})
if WHAT == "read" and jax.process_index() == 0:
    print(np.asarray(state["params"]["c"]))
whole = autopar.gather(state)
total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(whole["params"]))
print(f"whole {total:.6f} {jax.random.key_data(whole['key'])}", flush=True)
