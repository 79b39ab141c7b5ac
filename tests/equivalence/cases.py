"""The ways of running a train step that are compared with one device.

GPT in the full product of methods, stages and microbatches, and by default a pairwise covering set of it, without four
microbatches; every other model in the same product, and a few cases by default.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from tests.equivalence.subjects import SUBJECTS, Subject

DEVICES = 8
SMALL_BATCH = 8
LARGE_BATCH = 64  # an example for each of 8 data shards in each of 8 microbatches, so that no recipe loses a case

STAGES = (1, 2, 4)
MICROBATCHES = (1, 2, 4, 8)
# Each method and the variants of it that are told apart.
METHODS: dict[str, tuple[str, ...]] = {
    "data_parallel": ("",),
    "zero": ("stage1", "stage2", "stage3"),
    "megatron": ("dp1", "dp2"),
    "gpipe": ("",),
    "intra_op_only": ("",),
    "inter_op_only": ("",),
    "planned": ("",),
}
_ONE_STAGE = ("data_parallel", "zero", "intra_op_only")


@dataclasses.dataclass(frozen=True)
class Case:
    method: str
    variant: str
    stages: int  # pipeline stages asked for
    microbatches: int
    model: str = "gpt"  # of SUBJECTS

    def __str__(self) -> str:
        name = f"{self.method}-{self.variant}" if self.variant else self.method
        return f"{self.model}-{name}-{self.stages}stages-{self.microbatches}microbatches"

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.model]

    @property
    def num_layers(self) -> int:
        """Of the model: no fewer than stages, and few, because compiling takes most of the time."""
        return 4 if self.stages == 4 else 2

    @property
    def num_devices(self) -> int:
        """ "Inter-op only" gives each stage one device; the others use all."""
        return self.stages if self.method == "inter_op_only" else DEVICES

    @property
    def data_parallel(self) -> int:
        """Data shards that the method asks for; 1 where it is free to choose."""
        if self.method in ("data_parallel", "zero"):
            return DEVICES
        if self.method == "gpipe":  # data parallel within a stage
            return DEVICES // self.stages
        return int(self.variant.removeprefix("dp")) if self.method == "megatron" else 1

    @property
    def tensor_parallel(self) -> int:
        """Of "megatron": what data and pipeline parallelism leave of the devices."""
        return DEVICES // (self.data_parallel * self.stages)

    @property
    def must_reduce(self) -> bool:
        """Whether devices hold partial sums of one sum, by the method's definition: of gradients or of matrix products.

        Without this a recipe that computes everything on every device would pass, its numbers being right.
        """
        return self.data_parallel > 1 or (self.method == "megatron" and self.tensor_parallel > 1)

    @property
    def batch_size(self) -> int:
        """The small batch wherever it can be cut as asked."""
        count = LARGE_BATCH if SMALL_BATCH % (self.microbatches * self.data_parallel) else SMALL_BATCH
        return count * self.subject.unit

    @property
    def stages_known(self) -> bool:
        """Whether the plan must have exactly these stages.

        The planner is free to find something better. But eight microbatches of GPT over hosts with a slow network
        between them are worth a stage a host, or the planned pipelines would be no pipelines.
        """
        return self.method != "planned" or (self.microbatches == 8 and self.model == "gpt")


def senseless(case: Case) -> str | None:
    """Why this combination is left out, or None."""
    if case.microbatches > case.subject.max_microbatches:
        return f"{case.model} has at most {case.subject.max_microbatches} microbatches"
    if case.method in _ONE_STAGE and case.stages > 1:
        return f"{case.method} has no pipeline"
    if DEVICES % (case.data_parallel * case.stages):
        return f"{DEVICES} devices are not divisible by {case.data_parallel} × {case.stages}"
    return None


def full_product(model: str = "gpt") -> list[Case]:
    """Every combination that makes sense, in a fixed order."""
    cases = (
        Case(method, variant, stages, microbatches, model)
        for method, variants in METHODS.items()
        for variant, stages, microbatches in itertools.product(variants, STAGES, MICROBATCHES)
    )
    return [case for case in cases if senseless(case) is None]


def few_microbatches(cases: Iterable[Case]) -> list[Case]:
    """Those with one microbatch, with two, and with more than there are stages."""
    return [case for case in cases if case.microbatches in (1, 2, 8)]


Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(case: Case) -> frozenset[Pair]:
    """What a covering set must cover of this case.

    All pairs of method, stages and microbatches, and each variant once: seven methods with four numbers of microbatches
    already need 28 cases; variants as methods of their own would need 40.
    """
    values = (("method", case.method), ("stages", case.stages), ("microbatches", case.microbatches))
    variant = (("method", case.method), ("variant", case.variant))
    return frozenset([*itertools.combinations(values, 2), variant])


def covering(cases: Sequence[Case]) -> list[Case]:
    """A subset in which every pair of `cases` occurs: greedily the case that covers most of what is still missing.

    Ties go to the case that adds the rarest stages and microbatches so far, then to the first, so that the
    result depends on `cases` alone.
    """
    missing = {pair for case in cases for pair in pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs(case) & missing), -_times_used(case, chosen)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def _times_used(case: Case, chosen: Iterable[Case]) -> int:
    return sum((case.stages == other.stages) + (case.microbatches == other.microbatches) for other in chosen)


# The cases of the other models that always run; GPT has its covering set. The U-Net takes minutes to compile.
BY_DEFAULT = (
    Case("zero", "stage3", 1, 1, "gpt_scan"),
    Case("megatron", "dp2", 2, 2, "gpt_scan"),
    Case("data_parallel", "", 1, 2, "moe"),
    Case("zero", "stage3", 1, 2, "decoder"),
    Case("data_parallel", "", 1, 2, "encoder_decoder"),
    Case("megatron", "dp2", 1, 1, "wide_resnet"),
    Case("data_parallel", "", 1, 2, "lstm"),
    Case("zero", "stage1", 1, 1, "vit"),
)


def everything() -> list[Case]:
    """The product of every model."""
    return [case for model in SUBJECTS for case in full_product(model)]
