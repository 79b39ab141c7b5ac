"""Arrays from one process to another, which is slower or quicker to ask for them than they are there: `offers.py`."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.runtime.processes import this_job

SIZE = 256
job = this_job()
assert job is not None
channel, devices = job.channel("a test", ()), jax.local_devices()
job.connect()
numbered = jax.jit(lambda x, number: 0 * jnp.sin(x @ x) + number)
for step in range(30):
    channel.next_step()
    if job.index == 0:
        ones = [jax.device_put(np.ones((SIZE, SIZE), np.float32), devices[k % 2]) for k in range(4)]
        arrays = [numbered(x, 4.0 * step + k) for k, x in enumerate(ones)]
        job.offer(channel.uuid(0, 1), arrays)  # before they have been computed
        del arrays, ones  # and are gone before they are asked for
        others = [jnp.full((SIZE, SIZE), -1.0) for _ in range(4)]
    else:
        time.sleep(0.01 * (step % 3))
        structs = [
            jax.ShapeDtypeStruct((SIZE, SIZE), np.float32, sharding=SingleDeviceSharding(devices[k % 2]))
            for k in range(4)
        ]
        for k, x in enumerate(job.pull(channel.uuid(0, 1), 0, structs)):
            np.testing.assert_array_equal(np.asarray(x), np.full((SIZE, SIZE), 4.0 * step + k, np.float32))
channel.next_step()
kinds: list[tuple[tuple[int, ...], Any]] = [
    ((0, 4), np.float32), ((), np.int32), ((3,), np.bool_), ((0,), jnp.bfloat16), ((2, 3), np.int8),
]  # fmt: skip
for number, chosen in enumerate((kinds, kinds[:1])):
    if job.index == 0:
        job.offer(channel.uuid(number, 1), [jnp.ones(*kind) for kind in chosen])
    else:
        at = SingleDeviceSharding(devices[0])
        structs = [jax.ShapeDtypeStruct(*kind, sharding=at) for kind in chosen]
        for kind, x in zip(chosen, job.pull(channel.uuid(number, 1), 0, structs), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.ones(*kind))
print("all arrived")
