"""A small training script, and what can go wrong in it: `small.py [WHAT [PROCESS [FOLDER]]]`."""

from __future__ import annotations

import resource
import signal
import sys
import time
from importlib import metadata
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
    params = jax.tree.map(lambda p, g: p - state["rate"] * g, state["params"], gradients)
    noise = jax.random.normal(state["key"], ())
    key = jax.random.split(state["key"])[0]
    one = state["one"] * 1.5
    new = {"params": params, "count": state["count"] + 1, "key": key, "rate": state["rate"], "one": one}
    return new, (loss, noise)


if WHAT == "early" and IS_ODD:
    raise FileNotFoundError("examples.txt")
if WHAT == "stages" and IS_ODD:
    heard = sys.excepthook

    def slowly(*error: Any) -> None:
        """As on a busy machine."""
        time.sleep(3)
        heard(*error)

    sys.excepthook = slowly
jax.config.update("jax_num_cpu_devices", 1)  # no backend has been started that could not be told any more
devices = jax.device_count()
if WHAT == "versions" and IS_ODD:
    metadata.version = lambda distribution_name: f"{distribution_name} of long ago"
microbatches = 4 if WHAT == "method" and IS_ODD else 2
method = autopar.recipes.gpipe(2 if WHAT != "stages" else 64, microbatches) if devices > 1 else "auto"
step = autopar.parallelize(train_step, method=method)
if WHAT == "devices":
    step = autopar.parallelize(train_step, cluster=autopar.load_preset("dgx-h100"))
if WHAT in ("idle", "leave"):
    step = autopar.parallelize(train_step, cluster=autopar.load_preset("cpu", devices_per_host=1))
numbers = np.random.default_rng(0)
params: Any = {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.2 for name in "abc"}
# A number that a step only reads, of a weak type, and one that is no number but small.
state: Any = {"params": params, "count": 0, "key": jax.random.key(3), "rate": 0.1, "one": np.ones(1, np.float32)}
batch = {name: numbers.normal(size=(8, WIDTH)).astype(np.float32) for name in "xy"}
if WHAT == "leave" and jax.process_index():
    step.compile(state, batch)
    sys.exit()
for _ in range(3):
    state, (loss, noise) = step(state, batch)
    print(f"step {int(state['count'])}: {float(loss):.6f} {float(noise):.6f} {float(state['rate'])}", flush=True)
assert len(step._executables) == 1
if WHAT == "exit" and IS_ODD:
    sys.exit("no more examples")
if WHAT in ("steps", "gather", "other") and IS_ODD:
    sys.exit()  # as a loop ends whose iterator has fewer batches
if WHAT == "steps":
    jax.block_until_ready(step(state, batch))
if WHAT == "other":
    autopar.parallelize(lambda p, x: jnp.mean((x @ p["a"]) ** 2), follow=step)(state["params"], batch["x"])
if WHAT == "raise" and IS_ODD:
    raise ValueError("the disk is full")
if WHAT == "save":
    if IS_ODD:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # of a file, as if the disk were full
    autopar.save(sys.argv[3], state, step=1)
if WHAT == "nan":
    with jax.debug_nans(True):
        step(state, {**batch, "y": batch["y"] * np.nan})
if WHAT == "overflow":
    autopar.debug(step, infs=False, save_to=sys.argv[3])(state, {**batch, "y": batch["y"] * np.inf})
if WHAT == "alone" and IS_ODD:
    autopar.gather({"loss": loss})  # of what all know, for which nobody waits
    time.sleep(5)
if WHAT == "leave":
    sys.exit()
if WHAT == "read" and jax.process_index() == 0:
    print(np.asarray(state["params"]["c"]))
whole = autopar.gather(state)
total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(whole["params"]))
print(f"whole {total:.6f} {jax.random.key_data(whole['key'])} {whole['one']} {whole['rate']}", flush=True)
loss_of_all = autopar.parallelize(lambda p, rate, x: jnp.mean((x @ p["a"]) ** 2) * rate, follow=step)
print(f"whole {float(loss_of_all(state['params'], state['rate'], batch['x'])):.6f}", flush=True)
if WHAT == "late" and IS_ODD:
    time.sleep(3)  # the others are at their ends
    raise ValueError("the disk is full")
