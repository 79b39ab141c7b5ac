"""Hardware as data (`Cluster`) and the logical device meshes that stages run on (`Mesh`)."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autopar.ir.rendering import as_html
from autopar.ir.units import bytes_text, count_text, metric_text, seconds_text


@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of connection between devices, seen by one device."""

    name: str
    latency: float  # seconds per message
    bandwidth: float  # bytes per second and direction that one device gets out of it
    pair_bandwidth: float | None = None  # the part of it that goes to any one other device; None: all, by a switch
    # Of a network that the devices of a host share: what one gets while the others send nothing. None: no more.
    lone_bandwidth: float | None = None

    def among(self, count: int) -> Link:
        """What each of so many devices gets that send to one another only."""
        if self.pair_bandwidth is None:
            return self
        bandwidth = min(self.bandwidth, (count - 1) * self.pair_bandwidth)
        return dataclasses.replace(self, bandwidth=bandwidth, pair_bandwidth=None)

    def beside(self, senders: int, num_devices: int) -> float:
        """What each of so many devices of a host gets, bytes per second, while its other devices send nothing."""
        if self.lone_bandwidth is None:
            return self.bandwidth
        return min(self.lone_bandwidth, self.bandwidth * num_devices / senders)

    def __str__(self) -> str:
        return f"{self.name}, {metric_text(self.bandwidth, 'B/s')}, {seconds_text(self.latency)}"


class Patches(NamedTuple):
    """How the rows of a product lie in an array that they are the windows of (im2col), as in a convolution."""

    taps: int  # places in a window
    reuse: float  # windows that an element of the array is in
    gaps: int = 1  # places in which there is one element, where the array is dilated


class Attention(NamedTuple):
    """What the speed of fused attention depends on, whose products never are in memory."""

    keys: float  # of a query, where all are seen; of a causal mask those of the last query, twice the mean
    masked: bool  # as by a causal mask, so that parts of a tile are computed in vain
    width: float  # of a head
    backward: bool


Pooling = Literal["result", "gradient"]  # of reductions over windows of an array


class ProductSizes(NamedTuple):
    """`batch` products of (rows x depth) and (depth x columns) matrices."""

    batch: float
    rows: float
    columns: float
    depth: float
    patches: Patches | None = None  # where the rows are windows of an array
    attention: Attention | None = None  # both products of attention in one, and the backward pass's five


@dataclasses.dataclass(frozen=True)
class ProductSpeed:
    """What products of one size were measured to reach."""

    dtype: str
    sizes: ProductSizes
    flops: float  # FLOP per second


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """What the compiler of a cluster's programs does; the default is XLA for GPUs today."""

    collective_combine_threshold: int = 30 << 20  # bytes of results up to which it makes independent collectives one
    # Whether sums over devices that become one are copied into one array before, as Alpa's fork did
    # (`CombineAllReducesContinuousBuffer`). That takes memory; the time that it takes is not predicted.
    combines_contiguously: bool = False
    # Whether it runs collectives beside other kernels, as XLA for GPUs does today. That takes memory, and saves time.
    hides_latency: bool = True
    # The share of their speed that kernels lose while a collective runs beside them. ASSUMPTION: the share of the
    # multiprocessors that NCCL takes, 24 of an H100's 132.
    overlap_slowdown: float = 0.18
    # Whether a kernel has one result, reduces only what is in memory, and reads arrays that lie in another order
    # element by element, as XLA's for CPUs: those for GPUs merge kernels, and transpose in tiles.
    single_output: bool = False
    # Whether it makes long sums of products in parts where there are few of them, as XLA for GPUs does today.
    split_k: bool = True


XLA_FOR_GPUS = XlaBackend()

# With which XLA runs collectives beside kernels on all GPUs. It does so by itself on chips whose speed it knows (H100s
# and later ones), and not on others, as A100s (jaxlib 0.10.2).
LATENCY_HIDING_FLAG = "xla_gpu_enable_latency_hiding_scheduler"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a calibration has measured of a device; empty fields: nothing."""

    products: tuple[ProductSpeed, ...] = ()
    bandwidths: tuple[tuple[float, float], ...] = ()  # bytes that a kernel moves, ascending, and bytes per second
    # Bytes of an array, ascending, and bytes per second by which reading it against its order takes longer; none: by
    # nothing.
    strided_reads: tuple[tuple[float, float], ...] = ()
    # Elements of windows per second that reductions over windows go through one after the other, and their gradients;
    # none: at the speed of other arithmetic.
    pooling: Mapping[Pooling, float] = dataclasses.field(default_factory=dict)
    # Bytes of a buffer, ascending, and bytes per second in which a program sets one aside; none: in no time.
    allocations: tuple[tuple[float, float], ...] = ()
    # How many times as large as by the cost model a program's temporaries are, of programs with "convolutions" and of
    # "others", or nothing: for GPUs XLA's schedulers are known too well for a factor to help.
    temporaries: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """What one device of this kind can do: its data sheet, whose compiler makes its programs, what was measured."""

    name: str
    memory: int  # bytes that arrays may take
    memory_bandwidth: float  # bytes per second
    peak_flops: Mapping[str, float]  # FLOP per second by dtype name, e.g. "float32", "bfloat16"
    matmul_efficiency: float  # share of the peak that large matrix products reach, in (0, 1]
    memory_efficiency: float  # share of the bandwidth that large elementwise kernels reach, in (0, 1]
    launch_overhead: float  # seconds on the device for the smallest kernel
    dispatch_overhead: float  # seconds on the host to start one program
    memory_reserve: int = 0  # bytes of `memory` kept free for context, workspaces and fragmentation
    convolution_share: float = 1.0  # of that speed of products that large convolutions reach, in (0, 1]
    batched_share: float = 1.0  # .. and that many large products in one call reach, which are tuned less, in (0, 1]
    attention_share: float = 1.0  # of the published speed of fused attention that it reaches, in (0, 1]
    multiprocessors: int = 0  # thread blocks at a time, for small products; 0: of any size they are as fast
    xla: XlaBackend = XLA_FOR_GPUS  # whose compiler makes its programs
    measured: Measured = Measured()  # where it is not empty, instead of the shares and efficiencies above

    def __hash__(self) -> int:
        return hash((self.name, self.memory))

    def with_measured(self, **fields: Any) -> DeviceKind:
        """The same, with these fields of `measured` replaced."""
        return dataclasses.replace(self, measured=dataclasses.replace(self.measured, **fields))


@dataclasses.dataclass(frozen=True)
class Busy:
    """What virtual devices can do while no more than so many of their host are busy."""

    num_devices: int
    kind: DeviceKind
    link: Link


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine: devices of one kind behind one link."""

    kind: DeviceKind
    num_devices: int
    link: Link  # between the devices of this host
    # Of virtual devices, which share the cores of the host: `kind` and `link` are for all of them busy, these for
    # fewer, ascending. Programs on such a host take turns.
    busy: tuple[Busy, ...] = ()

    def while_busy(self, num_devices: int) -> Host:
        """What its devices can do while so many of them are busy."""
        for each in self.busy:
            if num_devices <= each.num_devices:
                return dataclasses.replace(self, kind=each.kind, link=each.link)
        return self


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines a plan is made for; they need not exist. Devices are numbered host by host from 0."""

    name: str
    hosts: tuple[Host, ...]
    network: Link  # between devices of different hosts

    @property
    def num_devices(self) -> int:
        return self.host_bounds[-1]

    @property
    def xla(self) -> XlaBackend:
        """One compiler makes the programs of all hosts."""
        return self.hosts[0].kind.xla

    @functools.cached_property
    def host_bounds(self) -> tuple[int, ...]:
        """The first device of every host, and the number of devices."""
        return (0, *itertools.accumulate(host.num_devices for host in self.hosts))

    def host_of(self, device: int) -> int:
        """Index of the host that holds the device of this number."""
        if not 0 <= device < self.host_bounds[-1]:
            raise IndexError(f"device {device} of a cluster of {self.num_devices}")
        return bisect.bisect_right(self.host_bounds, device) - 1

    def link_among(self, devices: Iterable[int]) -> Link:
        """What these devices send over: their host's link, or the network if they are on several."""
        hosts = set(map(self.host_of, devices))
        return self.hosts[hosts.pop()].link if len(hosts) == 1 else self.network

    def kinds_of(self, devices: Iterable[int]) -> tuple[DeviceKind, ...]:
        """The distinct kinds of these devices."""
        hosts = dict.fromkeys(map(self.host_of, devices))
        return tuple({self.hosts[host].kind.name: self.hosts[host].kind for host in hosts}.values())

    def while_busy(self, num_devices: int) -> Cluster:
        """The cluster while so many devices of a host are busy: others than `self` only where devices are virtual."""
        if not any(host.busy for host in self.hosts):
            return self
        return dataclasses.replace(self, hosts=tuple(host.while_busy(num_devices) for host in self.hosts))

    def __str__(self) -> str:
        lines = [f"Cluster {self.name} ({count_text(self.num_devices, 'device')})"]
        for host, equal in itertools.groupby(self.hosts):
            kind, number = host.kind, len(tuple(equal))
            peaks = ", ".join(f"{dtype} {metric_text(peak, 'FLOP/s')}" for dtype, peak in kind.peak_flops.items())
            lines += [
                f"{count_text(number, 'host')} × {count_text(host.num_devices, 'device')}: {kind.name}",
                f"  memory   {bytes_text(kind.memory)}, of which {bytes_text(kind.memory_reserve)} are kept free, "
                f"{metric_text(kind.memory_bandwidth, 'B/s')}",
                f"  peak     {peaks}",
                f"  link     {host.link}",
            ]
        return "\n".join([*lines, f"network    {self.network}"])

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for header in ("hosts", "devices each", "kind", "memory", "kept free", "bandwidth", "peak", "link"):
            table.add_column(header, overflow="fold")
        for host, equal in itertools.groupby(self.hosts):
            kind = host.kind
            peaks = "\n".join(f"{dtype} {metric_text(peak, 'FLOP/s')}" for dtype, peak in kind.peak_flops.items())
            table.add_row(
                str(len(tuple(equal))), str(host.num_devices), Text(kind.name), bytes_text(kind.memory),
                bytes_text(kind.memory_reserve), metric_text(kind.memory_bandwidth, "B/s"), peaks, Text(str(host.link)),
            )  # fmt: skip
        head = Text(f"Cluster {self.name} ({count_text(self.num_devices, 'device')})")
        return Group(head, table, Text(f"network  {self.network}"))

    def _repr_html_(self) -> str:
        return as_html([self.__rich__()])


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh: cluster devices in row-major order under named axes."""

    devices: tuple[int, ...]  # device numbers in the cluster, row-major over `shape`
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # one name per entry of `shape`

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.devices) or len(self.shape) != len(self.axes):
            raise ValueError(f"mesh {self.axes}={self.shape} does not match {len(self.devices)} devices")

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def text(self) -> str:
        """ "x=2 y=4"."""
        return " ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))

    @functools.cached_property
    def is_consecutive(self) -> bool:
        """Whether its devices are numbered in one run, in order."""
        return all(b - a == 1 for a, b in itertools.pairwise(self.devices))

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]

    def group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The cluster devices of one collective over `axes` (the group that holds the first device)."""
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        offsets = [0]
        for axis in axes:
            i = self.axes.index(axis)
            offsets = [o + k * strides[i] for o in offsets for k in range(self.shape[i])]
        return tuple(self.devices[o] for o in offsets)
