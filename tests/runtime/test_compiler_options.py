"""What XLA is told where the processes of a job compile different programs."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.cost_model.targets import load_target
from autopar.runtime import source as sources
from autopar.runtime.ahead import absent_gpus
from autopar.runtime.placement import Array
from autopar.runtime.source import Source, compile_options
from tests.h100 import needs_cuda_compiler

pytestmark = needs_cuda_compiler


def test_kernels_are_not_chosen_together_with_processes_that_compile_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = absent_gpus(load_target("h100"), 2, 2)  # of two processes
    assert sources.compiler_options(gpus[:2]) == {}  # alone
    monkeypatch.setattr(sources, "this_job", lambda: types.SimpleNamespace(count=2))
    options = sources.compiler_options(gpus[:2])
    assert options == {"xla_gpu_shard_autotuning": False}
    assert sources.compiler_options(gpus) == {}  # all have a part in the program
    assert sources.compiler_options(jax.devices()[:1]) == {}  # XLA for CPUs chooses nothing by trying
    sharding = NamedSharding(jax.sharding.Mesh(np.array(gpus[:2]), ("x",)), PartitionSpec())
    array = Array((64, 64), jnp.dtype("float32"), sharding)
    source = Source("square", lambda x: (x @ x,), (array,), (array,), ())
    assert compile_options(source, source.trace()) == options
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=SingleDeviceSharding(gpus[0]))
    assert jax.jit(lambda x: x @ x).lower(x).compile(options) is not None  # XLA knows the name
