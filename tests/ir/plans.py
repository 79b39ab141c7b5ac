"""A small plan made by hand: two stages on six devices of an eight-device cluster."""

from autopar.ir.graph import Block
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Mesh
from autopar.ir.plan import LeafPlan, Plan, StageMemory, StagePlan
from autopar.ir.sharding import Sharding

KIND = DeviceKind("toy", 1 << 20, 1e10, {"float32": 1e12}, 0.5, 0.75, 1e-6, 1e-5, 1 << 10)
CLUSTER = Cluster("lab", (Host(KIND, 4, Link("wire", 1e-6, 1e10)),) * 2, Link("net", 1e-5, 1e9))

FIRST = StagePlan(
    mesh=Mesh((0, 1, 2, 3), (2, 2), ("x", "y")),
    layers=(0, 3),
    equations=(0, 7),
    strategies={(0, 0): ((0, -1),), (0, 1): ((1, -2), (-1, -1)), (2, 0): ((0, 1),), (2, 5): ()},
    layouts={
        (None, 4): Sharding((("x", "y"), ())),
        (0, 4): Sharding(((), ("y",)), ("x",)),
        (None, 11): Sharding(()),
        (2, 3): Sharding(((),), ("x", "y")),
    },
    reshard_after_forward=True,
    forward=0.001,
    backward=0.0025,
    once=1 / 3000,
    compute=0.003,
    communication=0.1 + 0.2,
    memory=StageMemory(state=64 << 10, gradients=32 << 10, activations=100, temporaries=1 << 10, capacity=1023 << 10),
    recomputed=(Block(1, 4, ((2, 0), (3, 1))), Block(4, 7)),
)
SECOND = StagePlan(
    mesh=Mesh((4, 6), (2,), ("x",)),
    layers=(3, 4),
    equations=(7, 9),
    strategies={(1, 7): ((-1,),)},
    layouts={},
    reshard_after_forward=False,
    forward=0.002,
    backward=0.0,
    once=0.0,
    compute=0.002,
    communication=0.0,
    memory=StageMemory(state=0, gradients=0, activations=0, temporaries=0, capacity=1023 << 10),
)
WHOLE, ROWS = Sharding(((), ())), Sharding((("x",), ()))


def state(path: str, stage: int, sharding: Sharding, shape: tuple[int, ...] = (8, 16)) -> LeafPlan:
    return LeafPlan(path, shape, "float32", stage, sharding, True, None)


PLAN = Plan(
    function="train_step",
    fingerprint="00ff",
    method="auto",
    cluster=CLUSTER,
    num_microbatches=4,
    batch_size=32,
    schedule="1f1b",
    stages=(FIRST, SECOND),
    leaves=(
        state("params['blocks'][0]['q']", 0, ROWS),
        state("params['blocks'][0]['b']", 0, Sharding(((),)), (16,)),
        state("params['blocks'][1]['q']", 0, ROWS),
        state("params['blocks'][1]['b']", 0, Sharding(((),)), (16,)),
        state("params['blocks'][2]['q']", 0, WHOLE),
        state("params['blocks'][3]['q']", 1, ROWS),
        LeafPlan("rate", (), "float32", 1, Sharding(()), False, None),
        LeafPlan("batch['x']", (32, 5), "int32", 0, Sharding((("x", "y"), ())), False, 0),
    ),
    step_time=0.0123,
    bubble=0.25,
    flops=1e9,
    lower_bound=0.01,
    notes=("stage 0: pad it",),
    gap=0.001,
)
