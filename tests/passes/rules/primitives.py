"""The primitives that JAX defines."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from typing import Any

from jax.experimental.pallas import pallas_call_p
from jax.extend.core import Primitive

# What a Pallas kernel is written in, which is compiled as a whole.
_IN_KERNELS = ("jax._src.pallas.", "jax.experimental.pallas.", "jax.experimental.mosaic.")
# Where a user's step can come by primitives; each of their modules is imported.
_PACKAGES = ("jax._src.lax", "jax._src.random", "jax._src.state", "jax.experimental.sparse")


@functools.cache
def primitives_of_jax() -> dict[str, Any]:
    """By name: all that JAX's modules define in this version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in _PACKAGES:
            # Older versions of JAX have some of these in one file.
            for info in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", ())):
                importlib.import_module(f"{package}.{info.name}")
        for other in ("jax.experimental.multihost_utils", "jax.experimental.pallas.tpu"):
            importlib.import_module(other)  # other tests may have imported it
    found: dict[str, Any] = {pallas_call_p.name: pallas_call_p}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "jax" and not name.startswith(_IN_KERNELS):
            found.update({x.name: x for x in vars(module).values() if isinstance(x, Primitive)})
    return found
