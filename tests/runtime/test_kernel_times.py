"""What kernels take by kind of operator: which kind an instruction of XLA's is, and what its profiler has seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.runtime.hlo_text import parse
from autopar.runtime.kernel_times import kind_of, traced_kernels

GPU = """HloModule jit_step, is_scheduled=true

%fused_product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_tanh (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %tanh.1 = f32[8,8]{1,0} tanh(%c)
}

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %loop_tanh = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_tanh
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%n, %loop_tanh)
}

%condition (q: (s32[], f32[8,8])) -> pred[] {
  %q = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (y: f32[8,8]) -> f32[8,8] {
  %y = f32[8,8]{1,0} parameter(0)
  %gemm_fusion = f32[8,8]{1,0} fusion(%y, %y), kind=kCustom, calls=%fused_product
  %cublas = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%y, %y), custom_call_target="__cublas$lt$matmul"
  %conv = (f32[8,8]{1,0}, u8[0]{0}) custom-call(%y, %y), custom_call_target="__cudnn$convForward"
  %fmha = (f32[8,8]{1,0}, u8[0]{0}) custom-call(%y, %y, %y), custom_call_target="__cudnn$fmhaSoftmax"
  %topk = (f32[8,2]{1,0}, s32[8,2]{1,0}) custom-call(%y), custom_call_target="__gpu$TopK"
  %sum = f32[8,8]{1,0} all-reduce-start(%y), to_apply=%fused_tanh
  %summed = f32[8,8]{1,0} all-reduce-done(%sum)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}) tuple(%zero, %summed)
  %while = (s32[], f32[8,8]{1,0}) while(%start), condition=%condition, body=%body
  %copied = f32[8,8]{1,0} copy(%y)
  ROOT %last = f32[8,8]{1,0} get-tuple-element(%while), index=1
}
"""


def test_kinds_of_instructions() -> None:
    module = parse(GPU)
    found = {name: kind_of(module, i) for body in module.computations.values() for name, i in body.items()}
    assert {name: kind for name, kind in found.items() if kind is not None} == {
        "dot.1": "products", "gemm_fusion": "products", "cublas": "products", "conv": "convolutions",
        "fmha": "attention", "topk": "memory", "sum": "collectives", "loop_tanh": "memory", "tanh.1": "memory",
        "copied": "memory",
    }  # fmt: skip


@pytest.mark.parametrize("runs", [1, 3])
def test_kernels_of_a_program_that_ran(runs: int) -> None:
    @jax.jit
    def step(x: jax.Array, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.scan(lambda y, _: (jnp.tanh(y @ x), None), x, None, length=4)[0]
        kernel = jnp.ones((3, 3, 4, 4))
        convolved = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sort(y, axis=0), convolved

    x, image = jnp.eye(64), jnp.ones((2, 8, 8, 4))
    program = step.lower(x, image).compile()
    jax.block_until_ready(program(x, image))

    def run() -> None:
        for _ in range(runs):
            jax.block_until_ready(program(x, image))
        jax.block_until_ready(jax.jit(lambda x: x @ x @ x)(x))  # of another program

    text = program.as_text()
    assert text is not None
    found = traced_kernels(run, [text])
    assert found["products"].kernels == 4 * runs
    assert found["convolutions"].kernels == runs
    assert found["memory"].kernels >= runs and found.keys() == {"products", "convolutions", "memory"}
    assert all(times.seconds > 0 for times in found.values())
