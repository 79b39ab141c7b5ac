"""A process of two that have sent arrays to one another, and end: says how many threads for that are left then."""

from __future__ import annotations

import atexit
import pathlib
import time


def main() -> None:
    """Send, and receive."""
    atexit.register(say)  # before JAX and autopar have registered theirs, and so called after these
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    import autopar
    from autopar.runtime.processes import this_job

    autopar.initialize()
    job = this_job()
    assert job is not None
    other, here = 1 - job.index, jax.local_devices()[0]
    channel = job.channel()
    channel.next_step()
    job.offer(channel.uuid(0, other), [jax.device_put(np.full(3, job.index, np.float32), here)])
    wanted = jax.ShapeDtypeStruct((3,), np.float32, sharding=SingleDeviceSharding(here))
    [array] = job.pull(channel.uuid(0, job.index), other, [wanted])
    print(f"{np.asarray(array)} has come", flush=True)


def say() -> None:
    """How many threads serve transfers, after some seconds for them to end."""
    for _ in range(50):
        names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
        left = sum(name.startswith(("recv-thread", "send-thread")) for name in names)
        if not left:
            break
        time.sleep(0.1)
    print(f"{left} threads are left", flush=True)


if __name__ == "__main__":
    main()
