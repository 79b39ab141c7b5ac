"""The suites: what `benchmarks.all` runs, and `benchmarks.figures` writes a page of."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable

RESULTS = pathlib.Path(__file__).parent / "results"  # of whole suites: a file for each, by its name
_CONTEST = "benchmarks/data/iopddl/asplos-2025-iopddl-G.json.gz"


def _nothing() -> str:
    return ""


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark as it is run for the page."""

    name: str
    module: str
    title: str
    about: str  # what its figures are of
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()  # further arguments, for a run of minutes at most that shows that it works
    missing: Callable[[], str] = _nothing  # what it needs that is not here
    keeps: bool = False  # whether it can go on where it was ended early

    def result(self, folder: pathlib.Path = RESULTS) -> pathlib.Path:
        """Its file in a folder of results."""
        return folder / f"{self.name}.json"

    @property
    def command(self) -> str:
        """As a user types it."""
        return " ".join(["python -m", self.module, *self.arguments])


def _missing_compiler() -> str:
    from autopar.runtime.ahead import INSTALL, has_compiler

    return "" if has_compiler() else f"XLA's compiler for NVIDIA GPUs ({INSTALL})"


def _missing_browser() -> str:
    from benchmarks.browser import missing

    packages = [name for name in ("selenium", "bokeh") if importlib.util.find_spec(name) is None]
    return " and ".join(filter(None, [missing(), *packages]))


def _backend(_: None) -> str:
    import jax

    return jax.default_backend()


def _missing_gpu() -> str:
    from benchmarks.common import each_in_a_process

    return "" if next(each_in_a_process(_backend, [None])) == "gpu" else "a GPU"


SUITES = (
    Suite(
        "overhead", "benchmarks.overhead", "What autopar adds to a step",
        "Steps of a GPT planned by autopar over the same steps written by hand: under `jax.jit` on one device, and "
        "with the shardings of data parallelism and of Megatron-LM on 8 virtual devices. A bar is held against the "
        "upper end of a 95 % interval of the ratio; \"a a\" is the ratio of two copies of the program written by hand.",
        quick=("--rounds", "3"),
    ),
    Suite(
        "accuracy", "benchmarks.accuracy", "Predicted against published measurements",
        "What Alpa's authors (1 to 16 V100s) and those of SC'21's Megatron-LM (32 to 2,520 A100s) measured, for "
        "their plans: mean relative errors of step times by family, of Alpa's ablation of sharding within a stage "
        "(ablation) and of peak memory; how many rows ran and are predicted not to fit, or the other way round; "
        "and the share of pairs of methods that differ by more than 5 % and are predicted in the wrong order. Rows "
        "of files whose plan is not known exactly count for the order alone. How operators are sharded within a stage "
        "was never published: it is found by our solver and, where Alpa's was free, by the objective of that one "
        "(from its sources, looked up because of rows of this table).",
        quick=("--only", "intra-op-ablation wresnet 2"),
    ),
    Suite(
        "accuracy_h100", "benchmarks.accuracy", "Predicted against published measurements on H100s",
        "What Megatron-Core (48 to 6,144 H100s) and torchtitan (8) publish of models with fused attention, planned "
        "with their degrees of parallelism. Of microbatches and interleaved stages that are not published the best "
        "are meant, and taken. What they compute in 8 bits or with context parallelism is not scored.",
        arguments=("--measured", "benchmarks/data/h100_published.csv"), quick=("--only", "1.7B"),
    ),
    Suite(
        "memory_corpus", "benchmarks.memory_corpus", "Predicted memory against XLA's compiler",
        "Programs of GPT, MoE, Wide-ResNet, U-Net and encoder-decoder steps compiled for H100s that are not there: "
        "errors of the bytes of a program. Nothing was fitted to them.",
        quick=("--only", "unet, data parallel"), missing=_missing_compiler,
    ),
    Suite(
        "verify", "benchmarks.verify", "Plans held against XLA's compiler",
        "Stage programs on 1 to 64 H100s that are not there, compiled ahead of time: errors of the bytes of a "
        "program, plans accepted that XLA finds over capacity, errors of the bytes that collectives send, and the "
        "seconds that verifying a plan of GPT-39B on 64 devices takes.",
        quick=("--only", "gpt, one device"), missing=_missing_compiler,
    ),
    Suite(
        "calibration", "benchmarks.calibration", "A calibrated machine",
        "This machine with 8 virtual devices calibrated, then plans run that the calibration has not seen: errors "
        "of the predicted step times, and how far the rank correlation with the measured ones is from 1. Such a "
        "host is not the same twice, and another run has other figures.",
        quick=("--seconds", "20", "--only", "gpt"),
    ),
    Suite(
        "gpu", "benchmarks.gpu", "A calibrated GPU, filled",
        "One GPU calibrated, then steps run with as many examples as fit: step time and peak memory of a plan over "
        "those under `jax.jit`, errors of predicted step time and peak memory.",
        quick=("--seconds", "30", "--most-examples", "8", "--only", "gpt"), missing=_missing_gpu,
    ),
    Suite(
        "planner_alpa", "benchmarks.planner", "Plans for Alpa's weak scaling",
        "21 models on 1 to 64 V100s: the predicted time of our plan, found without the recipes' help, over the best "
        "of what Alpa published, Megatron's and DeepSpeed's best and our recipes take in the same cost model; seconds "
        "of planning, and GiB of the process that planned (rss).",
        ("--suite", "alpa"), ("--only", "gpt 350M on 1"), keeps=True,
    ),
    Suite(
        "planner_megatron", "benchmarks.planner", "Plans for Megatron-LM's configurations",
        "1.7B on 32 to 1008B on 3,072 A100s: the same beside the published degrees of parallelism.",
        ("--suite", "megatron"), ("--only", "megatron 1.7B"), keeps=True,
    ),
    Suite(
        "planner_h100", "benchmarks.planner", "Plans for what was published of H100s",
        "GPT of 1.7B on 48 to 462B on 6,144 H100s, Llama 3 of 8B on 8 to 405B on 16,384, in 8,192 to 131,072 tokens: "
        "the same beside the published degrees of parallelism, all in 16 bits.",
        ("--suite", "h100"), ("--only", "GPT 1.7B"), keeps=True,
    ),
    Suite(
        "planner_presets", "benchmarks.planner", "Plans on 1, 8 and 64 devices of every preset",
        "Models of Alpa's weak scaling on today's machines: the predicted time of our plan over that of the best of "
        "the usual recipes with as many microbatches as is best for each.",
        ("--suite", "presets"), ("--only", "gpt 350M on 1 of dgx-h100"), keeps=True,
    ),
    Suite(
        "planner_public", "benchmarks.public.planned", "Planning time on public code",
        "Train steps as public code has them: CPU seconds to plan them.",
        quick=("--only", "residual"),
    ),
    Suite(
        "planner_growth", "benchmarks.planner", "How planning time grows",
        "The exponents of planning time against the number of layers, scanned and unrolled, of operators and of "
        "hosts.",
        ("--suite", "growth"), ("--only", "layers, scanned"),
    ),
    Suite(
        "scan_layers", "benchmarks.scan_layers", "A scan over layers against the unrolled model",
        "A GPT planned for 8 V100s: how far the predicted step time is from that of the unrolled model, and how "
        "much more time planning takes with 24 to 96 layers than with 12 (CPU time).",
        quick=("--rounds", "1"),
    ),
    Suite(
        "report", "benchmarks.report", "Reports in a browser",
        "Pages of plans for GPT-39B on 64 H100s, opened in Chromium 1280 and 390 pixels wide: the largest, the "
        "slowest, messages in the console, pixels that are too wide.",
        quick=("--only", "gpt 39B, scanned"), missing=_missing_browser,
    ),
    Suite(
        "intra_op_solver", "benchmarks.intra_op_solver", "The solver on contest instances",
        "Six public instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, in the contest's "
        "time: what costs are above the best known ones, and how many are proved optimal.",
        quick=(_CONTEST, "--seconds", "10"),
    ),
    Suite(
        "distribution", "benchmarks.distribution", "From a plan to every host's instructions",
        "A GPT of 48 layers in 16 stages and 64 microbatches on 64 hosts of 8 H100s, by three schedules, scanned and "
        "unrolled: seconds until all hosts' instructions, what each device sends to which and each host's part of it, "
        "the proof that none waits for ever and the step in simulated time are there, after planning; memory of the "
        "process, planning included. The largest of them.",
        quick=("--hosts", "8"),
        missing=_missing_compiler,
    ),
    Suite(
        "dispatch", "benchmarks.dispatch", "What the worker itself takes",
        "Steps of tiny programs: host time of an instruction beyond the call of its compiled program, in microseconds; "
        "a step of 1,000 leaves over `jax.jit` of the same step, on one device and on 8 virtual ones; a pipeline of 8 "
        "stages and 64 microbatches over a loop written by hand. Ratios are medians over interleaved rounds, of leaves "
        "medians over five processes.",
        quick=("--rounds", "4"),
    ),
    Suite(
        "dispatch_gpu", "benchmarks.dispatch", "What the worker itself takes, with a GPU",
        "The same on the GPUs that are there. Where these are fewer than 8, leaves on one alone, and a pipeline of 4 "
        "stages; of fewer than 4 several stages have the same.",
        ("--gpu",), ("--rounds", "4"), missing=_missing_gpu,
    ),
    Suite(
        "pipeline", "benchmarks.pipeline", "Pipelines over two processes",
        "A chain of layers over two processes of one CPU device and one core each, with 16 and 32 microbatches: what "
        "efficiency is possible, m / (m + p - 1), over the best of the rounds, beside calls written by hand; and over "
        "the CPU time of the idler process. Microbatches in flight: how many more a stage holds at most than its "
        "schedule says. Predicted error: of the step time, by a calibration of each core and of the link between the "
        "processes, from the median of the rounds.",
        quick=("--rounds", "1", "--seconds", "20"),
    ),
    Suite(
        "transfer", "benchmarks.transfer", "Transfers between meshes",
        "128 pairs of meshes and shardings, 18 KB to 16 MB, on two processes of 4 CPU devices: how many send more "
        "bytes than the fewest, and the most over these; the most time over what is allowed, which is 1.25 times "
        "the best of three ways (every device for itself, gather then scatter, ours), or 150 us more. Other ways' "
        "times over ours are medians. In one process: how many of the transfers read an array on the host, and how "
        "many `jax.device_put` of whole arrays does.",
        quick=("--rounds", "6", "--every", "9"),
    ),
    Suite(
        "faults", "benchmarks.faults", "Jobs whose processes are lost",
        "Jobs of 2 to 4 processes on one machine of which one, by lot, is killed or stopped: how many others did not "
        "name it, and the most seconds until all had ended (stopped: with a heartbeat timeout of 5 s). Jobs that are "
        "killed at moments by lot and started again on 1 to 4 processes: how many starts did not go on from the latest "
        "complete checkpoint, the most seconds until a first step, and the largest relative error of a loss against a "
        "run that nothing happened to. "
        "Checkpoints with a flipped bit or a file cut short, files that may not grow as on a full disk, a second run "
        "in the same folder, a clock that is an hour behind: how many were not survived. The GPT of `make train` on "
        "two processes: the most seconds from a kill to the next step. And the most by which memory, "
        "threads, open files or arrays of a process grow from 2,000 to 10,000 steps, in medians of three checkpoints.",
        quick=("--trials", "2", "--kills", "2", "--damages", "1"),
    ),
    *(
        Suite(
            f"weak_scaling_{family}", "benchmarks.weak_scaling", f"Weak scaling of {title}, executed",
            "1, 2 and 4 processes of one CPU device each train a model that grows with them: throughput of a device "
            "over that of one alone, measured and predicted (by the presets, uncalibrated). Where there are fewer "
            "cores than processes, they share them; and what they send to one another goes over the loopback, where "
            "a message may wait (see docs/launch.md).",
            ("--family", family), ("--processes", "1", "--steps", "2"),
        )
        for family, title in (("gpt", "GPT"), ("moe", "a mixture of experts"), ("wresnet", "Wide-ResNet"))
    ),
)  # fmt: skip
