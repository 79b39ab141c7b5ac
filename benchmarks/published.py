"""Published measurements as programs and methods of ours, to be planned and priced as they ran.

Alpa's rows (`alpa_osdi22_measured.json`) carry model, batch and plan; how single operators were sharded within a stage
is never recorded: that is left to the solver, under the row's options and, where Alpa's own solver was free, by its
objective (`seen_by_alpa`, `_as_alpa_chose`). What the systems themselves do is said here
once for all rows: Megatron-LM and DeepSpeed drop out a tenth, Alpa nothing; Alpa looks tokens up by a product with
one-hot rows, keeps weights in 16 bits beside a copy in float32, takes the statistics of batch norm by microbatch, and
marks all gradients at once, so that all are held when the update begins; its figures of memory are GiB. All of them
sum in 16 bits what has 16. Megatron-LM's tensor parallelism had no sequence parallelism then; that on H100s has.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.ir.mesh import Cluster, DeviceKind
from autopar.ir.method import Method
from benchmarks.models import decoder, gpt, moe, wide_resnet

_RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_MANY_LAYERS = 48  # of which the model is written as a scan, for the sake of planning time
# Presets of the machines that were measured, with the compilers of then.
ALPAS, MEGATRONS = "p3.16xlarge-2022", "dgx-a100-2021"
# Constants of the V100's presets that were fitted to measurements, by the family and number of devices of these: rows
# that say nothing about the cost model, which are scored apart.
FITTED = {("moe", 1): "batched_share", ("wresnet", 1): "convolution_share"}
MICROBATCH_SIZES = (1, 2, 4)  # where a source does not say one
_DROPOUT = 0.1  # of Megatron-LM and DeepSpeed, unless they are told otherwise
_DTYPES = {"fp16": jnp.float16, "fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which a measured program may have run."""

    method: Method
    num_microbatches: int


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row: what ran where, and what was seen."""

    case: str  # experiment, model and devices: measurements of one case differ by their method
    family: str
    method: str
    ablation: bool  # of sharding within one stage
    spec: Mapping[str, Any]
    batch_size: int
    cluster: Cluster
    ways: tuple[Way, ...]  # the best of which it was; () if no method of ours says it
    seconds: float | None  # of a step; None: not published
    memory: float | None  # bytes on a device
    fits: bool  # else it ran out of memory
    doubt: str  # why it is not scored; "" if it is
    ranked: bool  # whether it counts in the comparison of methods
    fitted: str = ""  # the constant that was fitted to it; "" if it is held out
    reduces_own_dtype: bool = True  # gradients in 16 bits are summed in 16 bits

    def step(self, way: Way) -> tuple[Callable[..., Any], Any, Any]:
        """The train step, and the shapes of its state and batch."""
        scan = self.spec["family"] in ("gpt", "decoder") and self.spec["num_layers"] > _MANY_LAYERS
        return train_step(self.spec, self.batch_size, way.num_microbatches, scan=scan)


def read(path: pathlib.Path) -> list[Measurement]:
    """The measurements of a file in one of three formats."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
        return [_h100(row) if "dp_shard" in row else _megatron(row) for row in rows]
    return [_alpa(row) for row in json.loads(path.read_text())["rows"]]


# Alpa's artifact.


def _alpa(row: Mapping[str, Any]) -> Measurement:
    latencies = [x for x in row.get("latencies") or () if x > 0]
    failed = not latencies and row["tflops"] <= 0
    seconds = math.fsum(latencies) / len(latencies) if latencies else None
    if seconds is None and not failed and row["model"] == "gpt" and row["batch_size"]:
        seconds = _gpt_flops(row["model_spec"], row["batch_size"]) / (row["tflops"] * 1e12 * row["num_gpus"])
    suspect, projected = "suspect" in row, row.get("projected", False)
    doubts = {
        "its plan is not known exactly": row["plan_known"] != "exact",
        "the sources contradict one another": suspect,
        "it was projected": projected,
        "no time was published": seconds is None and not failed,
    }
    ways = tuple(_ways(row))
    doubts["no method says what ran"] = not ways
    hosts = row["hosts"]
    memory = row.get("peak_mem") or 0.0
    return Measurement(
        case=f"{row['exp']} {row['model']} {row['num_gpus']}",
        family=row["model"],
        method=row["method"],
        ablation=row["exp"].startswith("intra"),
        spec={
            **row["model_spec"],
            "family": row["model"],
            "alpa": row["method"].startswith("alpa"),
            "dropout": 0.0 if row["method"].startswith("alpa") else _DROPOUT,
        },
        batch_size=row["batch_size"] or 0,
        cluster=_cluster(hosts, row),
        ways=ways,
        seconds=seconds,
        memory=memory * 2**30 if memory > 0 else None,
        fits=not failed,
        doubt="; ".join(text for text, holds in doubts.items() if holds),
        ranked=not suspect and not projected,
        fitted=FITTED.get((row["model"], row["num_gpus"]), ""),
    )


def _cluster(hosts: int, row: Mapping[str, Any]) -> Cluster:
    return load_preset(ALPAS, num_hosts=hosts, devices_per_host=row["num_gpus"] // hosts)


def _gpt_flops(spec: Mapping[str, Any], batch_size: int) -> float:
    """Of a step, by the formula by which these TFLOPS are given."""
    tokens, width = batch_size * spec["seq_len"], spec["hidden_size"]
    blocks = (96 if spec["remat"] else 72) * tokens * width**2 * spec["num_layers"]
    return float(blocks * (1 + spec["seq_len"] / (6 * width)) + 6 * tokens * width * spec["vocab_size"])


def _ways(row: Mapping[str, Any]) -> Iterator[Way]:
    plan = row["plan"]
    numbers = [row["num_micro_batches"]] if row["num_micro_batches"] else plan.get("num_micro_batches_candidates", [])
    for m in numbers:
        method = method_of(plan, m)
        if method is not None:
            yield Way(_as_alpa_chose(method) if row["method"].startswith("alpa") else method, m)


def _as_alpa_chose(method: Method) -> Method:
    """Where Alpa's solver chose the shardings, it did so for one microbatch.

    The option that would have counted the sums of gradients once for all of them (`grad_acc_num_micro_batches`) is
    switched off in its `run_auto_sharding_pass`.
    """
    return method if method.data_axes else dataclasses.replace(method, objective="microbatch")


def seen_by_alpa(cluster: Cluster) -> Cluster:
    """A cluster in the objective of Alpa's solver: communication counts, memory traffic and kernels do not."""

    def seen(kind: DeviceKind) -> DeviceKind:
        return dataclasses.replace(kind, memory_bandwidth=1e18, launch_overhead=0.0)

    hosts = tuple(dataclasses.replace(host, kind=seen(host.kind)) for host in cluster.hosts)
    return dataclasses.replace(cluster, hosts=hosts)


def method_of(plan: Mapping[str, Any], m: int) -> Method | None:
    """A published plan in so many microbatches as a method; None if no method says it."""
    match plan["kind"]:
        case "dp_tp_pp":
            return recipes.megatron(plan["dp"], plan["tp"], plan["pp"], m, sequence_parallel=False)
        case "dp_ep_tp_pp" if plan["tp"] == plan["pp"] == 1 and plan["ep"] == plan["dp"]:
            return Method("expert_parallel", 1, m, (plan["dp"],))
        case "intra_op" if plan["logical_shape"] and "force_simple_heuristic" not in plan["options"]:
            return _within_one_stage(plan, m)
        case "stages":
            stages = [
                (len(layers), _trimmed(shape))
                for layers, shape in zip(plan["forward_stage_layer_ids"], plan["submesh_logical_shapes"], strict=True)
            ]
            return _restricted(recipes.pipeline(stages, m), plan["options"], plan["submesh_options"])
    return None


def _within_one_stage(plan: Mapping[str, Any], m: int) -> Method:
    stage = plan.get("zero_stage")
    if stage == 0:
        return recipes.data_parallel(m)
    if stage is not None:
        return recipes.zero(stage, m)
    options, shape = plan["options"], _trimmed(plan["logical_shape"])
    return _restricted(Method("intra_op", 1, m, shape), options, [])


def _trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """(n, 1) as (n,): the first axis is the one over which the examples are split, where they must be."""
    return (shape[0],) if shape[1] == 1 else tuple(shape)


def _restricted(method: Method, options: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> Method:
    """Where examples must be split over the first axis, they are over no other: products of matrices are.

    Alpa's strategies of a convolution cut examples and channels, and no images.
    """
    method = dataclasses.replace(method, spatial=False)
    merged = [{**options, **own} for own in each] or [dict(options)]
    if any(o["force_batch_dim_to_mesh_dim"] != 0 for o in merged):
        return method
    return dataclasses.replace(method, data_axes=("x",), model_axes=("y", "z"))


# Megatron-LM.


def _megatron(row: Mapping[str, str]) -> Measurement:
    tp, pp, dp, gpus = (int(row[name]) for name in ("TP", "PP", "DP", "gpus"))
    batch_size, layers, width = int(row["global_batch"]), int(row["layers"]), int(row["hidden"])
    length, vocabulary = int(row["seq"]), int(row["vocab"])
    m = batch_size // (dp * int(row["microbatch"]))
    share = 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    flops = 96 * batch_size * length * layers * width**2 * share
    chunks = layers // (pp * int(row["virtual_stage_layers"])) if row["virtual_stage_layers"] else 1
    return Measurement(
        case=f"sc21 gpt {gpus}",
        family="megatron",
        method=f"megatron {row['params_B']}B",
        ablation=False,
        spec=megatron_spec(row),
        batch_size=batch_size,
        cluster=load_preset(MEGATRONS, num_hosts=gpus // 8),
        ways=(Way(recipes.megatron(dp, tp, pp, m, chunks, sequence_parallel=False), m),),
        seconds=flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus),
        memory=None,
        fits=True,
        doubt="",
        ranked=True,
    )


def megatron_spec(row: Mapping[str, str]) -> dict[str, Any]:
    """The specification of the model in a row of the table."""
    return {
        "family": "gpt", "alpa": False, "seq_len": int(row["seq"]), "hidden_size": int(row["hidden"]),
        "num_layers": int(row["layers"]), "num_heads": int(row["heads"]), "vocab_size": int(row["vocab"]),
        "dtype": "fp16", "remat": True, "optimizer": "adam", "master_copy": "fp32",
        "dropout": _DROPOUT,
    }  # fmt: skip


# H100s.

_TORCHTITANS = 96 * 10**9, 2.4e12  # bytes of memory, and bytes/s, of the H100s of Grand Teton hosts


def _h100(row: Mapping[str, str]) -> Measurement:
    gpus, batch_size, length = (int(row[name] or 0) for name in ("gpus", "global_batch", "seq"))
    layers, width, vocabulary = (int(row[name]) for name in ("layers", "hidden", "vocab"))
    is_llama = int(row["ffn"]) != 4 * width
    degrees = {name: int(row[name] or 0) for name in ("dp_shard", "tp", "pp", "cp", "vp")}
    seconds: float | None = None
    if row["tokens_per_s_per_gpu"]:
        seconds = batch_size * length / (float(row["tokens_per_s_per_gpu"]) * gpus)
    elif batch_size and not is_llama:
        share = 1 + length / (6 * width) + vocabulary / (12 * layers * width)
        flops = 72 * batch_size * length * layers * width**2 * share
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    doubts = {
        "its batch is not stated": not batch_size,
        "what its FLOP/s count is not stated": batch_size > 0 and seconds is None,
        "products in 8 bits are not planned": "8" in row["precision"],
        "its context parallelism is not a method": degrees["cp"] > 1,
    }
    memory = float(row["memory_GiB"]) * 2**30 if row["memory_GiB"] else None
    return Measurement(
        case=f"{row['system']} {row['model']} {row['precision']} {gpus}",
        family=row["system"].lower().replace("-", "_"),
        method=" ".join(f"{name} {n}" for name, n in degrees.items() if n > 1),
        ablation=False,
        spec={
            "family": "decoder" if is_llama else "gpt", "alpa": False, "seq_len": length, "hidden_size": width,
            "num_layers": layers, "num_heads": int(row["heads"]), "num_key_value_heads": int(row["kv_heads"]),
            "mlp_size": int(row["ffn"]), "vocab_size": vocabulary, "dtype": "bf16", "remat": row["recompute"] != "",
            "optimizer": "adam", "dropout": 0.0, "fused_attention": True,
            **({} if row["system"] == "torchtitan" else {"master_copy": "fp32"}),
        },
        batch_size=batch_size,
        cluster=_h100s(row["system"], gpus),
        ways=tuple(_h100_ways(row, degrees, batch_size, layers)) if batch_size and degrees["cp"] == 1 else (),
        seconds=seconds,
        memory=memory,
        fits=True,
        doubt="; ".join(text for text, holds in doubts.items() if holds),
        ranked=False,
        reduces_own_dtype=True,
    )  # fmt: skip


def _h100s(system: str, gpus: int) -> Cluster:
    cluster = load_preset("dgx-h100", num_hosts=math.ceil(gpus / 8), devices_per_host=min(gpus, 8))
    if system != "torchtitan":
        return cluster
    memory, bandwidth = _TORCHTITANS
    host = cluster.hosts[0]
    share = bandwidth / 3.35e12  # of that of the preset's H100s
    kind = dataclasses.replace(host.kind, memory=memory, memory_bandwidth=share * host.kind.memory_bandwidth)
    return dataclasses.replace(cluster, hosts=tuple(dataclasses.replace(each, kind=kind) for each in cluster.hosts))


def _h100_ways(row: Mapping[str, str], degrees: Mapping[str, int], batch_size: int, layers: int) -> Iterator[Way]:
    """All sizes of microbatches and numbers of interleaved stages where a row does not say one."""
    dp, tp, pp = (degrees[name] for name in ("dp_shard", "tp", "pp"))
    sizes = [int(row["micro_batch"])] if row["micro_batch"] else MICROBATCH_SIZES
    most = layers // pp if pp > 1 else 1
    equal = [c for c in range(2, min(most, 8) + 1) if layers % (pp * c) == 0]
    chunks = [degrees["vp"]] if degrees["vp"] else [1, *equal]
    for size, each in itertools.product(sizes, chunks):
        m, rest = divmod(batch_size, dp * size)
        if rest == 0 and m > 0 and (each == 1 or m % pp == 0):
            if row["system"] == "torchtitan" and tp == pp == 1:
                yield Way(recipes.zero(3, m), m)
            else:  # Megatron-Core's "distributed optimizer"
                yield Way(recipes.megatron(dp, tp, pp, m, each, zero=1, sequence_parallel=True), m)


# The programs.


def train_step(
    spec: Mapping[str, Any], batch_size: int, num_microbatches: int, *, scan: bool
) -> tuple[Callable[..., Any], Any, Any]:
    """The train step of a specification, and the shapes of its state and batch; `scan`: over GPT's layers."""
    dtype = _DTYPES[spec["dtype"]]
    model: Any
    config: Any
    if spec["family"] == "wresnet":
        model = wide_resnet
        config = wide_resnet.WideResNetConfig(
            _RESNET_BLOCKS[spec["num_layers"]], spec["num_channels"], spec["width_factor"], spec["num_classes"],
            spec["image_size"], dtype, spec["remat"], norm_groups=num_microbatches,
        )  # fmt: skip
        optimizer = optax.sgd(1e-3, momentum=0.9)
    else:
        sizes: dict[str, Any] = {
            "vocab_size": spec["vocab_size"], "sequence_length": spec["seq_len"], "num_layers": spec["num_layers"],
            "width": spec["hidden_size"], "num_heads": spec["num_heads"],
            "dtype": dtype, "remat": spec["remat"],
        }  # fmt: skip
        if spec["family"] == "decoder":
            model, optimizer = decoder, optax.adamw(1e-3)
            config = decoder.DecoderConfig(
                **sizes, num_key_value_heads=spec["num_key_value_heads"], hidden=spec["mlp_size"],
                fused_attention=spec["fused_attention"], scan=scan,
            )  # fmt: skip
        elif spec["family"] == "gpt":
            model, optimizer = gpt, optax.adamw(1e-3)
            config = gpt.GPTConfig(
                **sizes, dropout=spec.get("dropout", 0.0), one_hot=spec["alpa"],
                fused_attention=spec.get("fused_attention", False), scan=scan,
            )  # fmt: skip
        else:
            model, optimizer = moe, optax.adafactor(1e-3)
            config = moe.MoEConfig(
                **sizes, dropout=spec.get("dropout", 0.0), one_hot=spec["alpa"], num_experts=spec["num_experts"],
                mlp_factor=spec["mlp_factor"],
                group_size=spec["expert_group_size"] or 2 * spec["seq_len"],
            )  # fmt: skip
    init, narrow = model.make_init(config, optimizer), dtype != jnp.float32 and spec.get("master_copy")
    if narrow:
        optimizer = with_master_copy(optimizer)
        state = jax.eval_shape(lambda key: _narrowed(init(key), optimizer, dtype), jax.random.key(0))
    else:
        state = jax.eval_shape(init, jax.random.key(0))
    if spec["alpa"] and num_microbatches == 1:  # with more, sums are what is marked
        optimizer = _after_all_gradients(optimizer)
    return model.make_train_step(config, optimizer), state, model.abstract_batch(config, batch_size)


def _narrowed(state: Any, optimizer: optax.GradientTransformation, dtype: Any) -> Any:
    """With weights in 16 bits."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), state["params"])
    return {**state, "params": params, "opt_state": optimizer.init(params)}


def _after_all_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, renewed = optimizer.update(jax.lax.optimization_barrier(gradient), state, params)
        return updates, renewed

    return optax.GradientTransformation(optimizer.init, update)


def with_master_copy(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Updates a copy of the parameters in float32, of which they are the rounded values (Micikevicius et al. 2018)."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return {"master": wide(params), "inner": optimizer.init(wide(params))}

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = optimizer.update(wide(gradient), state["inner"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        changes = jax.tree.map(lambda new, old: new.astype(old.dtype) - old, master, params)
        return changes, {"master": master, "inner": inner}

    return optax.GradientTransformation(init, update)
