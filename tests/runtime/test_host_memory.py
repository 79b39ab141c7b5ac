"""A process that runs steps on CPUs keeps what they free: seen by the pages that it waits for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import jax
from autopar.runtime.host_memory import keep_memory

def faults_of_a_large_array():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(200 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory(jax.devices())
faults_of_a_large_array()
print(faults_of_a_large_array())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, False)],
)
def test_what_is_freed_is_kept(settings: dict[str, str], is_kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**environment, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert (int(done.stdout) < 100) is is_kept
