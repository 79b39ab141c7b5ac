"""A process of two that have sent arrays to one another, and end: says how many threads for that are left then."""

from __future__ import annotations

import atexit
import contextlib
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
    channel = job.channel("a test", ())
    channel.next_step()
    job.offer(channel.uuid(0, other), [jax.device_put(np.full(3, job.index, np.float32), here)])
    wanted = jax.ShapeDtypeStruct((3,), np.float32, sharding=SingleDeviceSharding(here))
    [array] = job.pull(channel.uuid(0, job.index), other, [wanted])
    print(f"{threads()} threads serve arrays; {np.asarray(array)} has come", flush=True)
    # One is still under way when this ends, and held by nobody.
    channel.next_step()
    if job.index:
        job.pull(channel.uuid(0, 1), 0, [wanted])
    else:
        time.sleep(1.0)
        job.offer(channel.uuid(0, 1), [jax.device_put(np.zeros(3, np.float32), here)])


def threads() -> int:
    """How many serve transfers."""
    found = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += (task / "comm").read_text().startswith(("recv-thread", "send-thread"))
    return found


def say() -> None:
    """How many are left, after some seconds for them to end."""
    until = time.monotonic() + 5.0
    while threads() and time.monotonic() < until:
        time.sleep(0.1)
    print(f"{threads()} threads are left", flush=True)


if __name__ == "__main__":
    main()
