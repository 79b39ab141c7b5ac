"""What the kernels of a step take, as JAX's profiler has seen them, by what kind of operator they compute."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from autopar.ir.local import OperatorKind
from autopar.runtime.hlo_text import HloInstruction, Module, parse
from autopar.runtime.hlo_traffic import is_collective, is_free

_CONTAINERS = frozenset({"while", "conditional", "call", "async"})  # whose instructions are seen by themselves
_PRODUCTS = re.compile(r"gemm|matmul|dot", re.IGNORECASE)
_CONVOLUTIONS = re.compile(r"conv", re.IGNORECASE)
_ATTENTION = re.compile(r"fmha|attention|sdpa", re.IGNORECASE)


class KernelTimes(NamedTuple):
    """Of kernels of one kind, all devices of this process together."""

    kernels: float
    seconds: float


def traced_kernels(run: Callable[[], Any], programs: Iterable[str]) -> dict[OperatorKind, KernelTimes]:
    """What kernels take while `run` does, until it returns; what it runs has to have ended then.

    Args:
      programs: XLA's texts of the programs that count.

    Raises:
      RuntimeError: JAX's profiler is in use.
    """
    kinds = {}
    for text in programs:
        module = parse(text)
        kinds[_name_of(text)] = {
            name: kind for body in module.computations.values() for name, i in body.items()
            if (kind := kind_of(module, i)) is not None
        }  # fmt: skip
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        found: dict[OperatorKind, KernelTimes] = defaultdict(lambda: KernelTimes(0, 0.0))
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for module_name, operation, seconds in _events(file):
                kind = kinds.get(module_name, {}).get(operation)
                if kind is not None:
                    before = found[kind]
                    found[kind] = KernelTimes(before.kernels + 1, before.seconds + seconds)
    return dict(found)


def _events(file: pathlib.Path) -> Iterable[tuple[str, str, float]]:
    """The module, the instruction and the seconds of each kernel.

    Of GPUs what their streams run: on the host there are the launches.
    """
    planes = [*jax.profiler.ProfileData.from_file(str(file)).planes]
    of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in of_devices or planes:
        for line in plane.lines:
            if of_devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                about = dict(event.stats)
                if "hlo_op" in about and "hlo_module" in about:
                    yield str(about["hlo_module"]), str(about["hlo_op"]), 1e-9 * event.duration_ns


def _name_of(text: str) -> str:
    match = re.match(r"HloModule ([\w.\-]+)", text)
    return match[1] if match else ""


def kind_of(module: Module, i: HloInstruction) -> OperatorKind | None:
    """What an instruction computes; None: it is no kernel, or its parts are."""
    opcode = i.opcode.removesuffix("-start")
    if opcode in _CONTAINERS or is_free(opcode):
        return None
    if is_collective(opcode):
        return "collectives"
    if opcode == "fusion":
        fused = module.computations[i.computations("calls")[0]].values()
        parts = {kind_of(module, each) for each in fused}
        return next((kind for kind in ("attention", "convolutions", "products") if kind in parts), "memory")
    if opcode == "convolution":
        return "convolutions"
    if opcode == "dot":
        return "products"
    if opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        for kind, names in (("attention", _ATTENTION), ("convolutions", _CONVOLUTIONS), ("products", _PRODUCTS)):
            if target is not None and names.search(target[1]):
                return kind  # type: ignore[return-value]
    return "memory"
