"""What functions of one element cost, beside the programs that XLA makes of them."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from autopar.passes.rules.elementwise import EXPANDED
from tests.h100 import h100_devices, needs_cuda_compiler

OPERANDS = {"igamma": 2, "igamma_grad_a": 2, "igammac": 2, "polygamma": 2, "regularized_incomplete_beta": 3, "zeta": 2}
NAMES = {"regularized_incomplete_beta": "betainc"}  # in `jax.lax`, where it is another
FUNCTIONS = {"cosine", "exponential", "log", "log-plus-one", "power", "rsqrt", "sine", "sqrt"}  # each some 4 operations
FREE = {"bitcast", "broadcast", "constant", "copy", "fusion", "get-tuple-element", "parameter", "tuple", "while"}


@needs_cuda_compiler
@pytest.mark.parametrize("name", EXPANDED)
def test_functions_without_an_instruction_are_as_many_operations_as_xla_makes_of_them(name: str) -> None:
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=SingleDeviceSharding(h100_devices(1)[0]))
    compiled = jax.jit(getattr(jax.lax, NAMES.get(name, name))).lower(*[x] * OPERANDS.get(name, 1)).compile()
    found = collections.Counter(re.findall(r" = \S+ ([a-z0-9\-]+)\(", compiled.as_text() or ""))
    operations = sum(4 * n if op in FUNCTIONS else n for op, n in found.items() if op not in FREE)
    assert EXPANDED[name] == pytest.approx(operations, rel=0.1)
