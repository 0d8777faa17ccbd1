"""Devices and clusters by name, as data sheets have them; calibrate for what yours reach.

Peaks are of dense matrix products. Data sheets do not say which share of them programs reach:
`ASSUMED` is a guess for all of them, and `spread` says how far it may be off. Attention of `HOPPER`
was measured: cuDNN's, causal, 8,192 positions of 32 query and 8 key/value heads of 128 in bfloat16
took 1.01 ms forward and 2.97 ms backward on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ...dist.errors import InvalidArgumentError
from .cluster import Cluster, Device, Link, Shares

GIB = 2**30
ASSUMED: dict[str, Shares] = {
    "matmul": ((1e7, 0.02), (1e9, 0.25), (1e11, 0.65)),
    "attention": ((1e8, 0.1), (1e10, 0.4)),
    "attention backward": ((1e8, 0.08), (1e10, 0.35)),
    "other": ((1e6, 0.3), (1e8, 0.8)),
}
HOPPER: dict[str, Shares] = {
    **ASSUMED,
    "attention": (*ASSUMED["attention"], (5.5e11, 0.55)),
    "attention backward": (*ASSUMED["attention backward"], (1.37e12, 0.47)),
}
_OVERHEAD = 3e-6  # seconds between two kernels; assumed as well
_SPREAD = 0.3
_NCCL_GROUP = 512 * 2**20  # of each communicator, as in the table of devices


def _device(name: str, gib: int, half: float, single: float, moving: float, source: str) -> Device:
    flops = {"float16": half, "bfloat16": half, "float32": single}
    if "V100" in name:
        del flops["bfloat16"]
    shares = HOPPER if name.startswith("H") else ASSUMED
    return Device(
        name, gib * GIB, flops, moving, _OVERHEAD, shares, spread=_SPREAD,
        source=f"{source}; shares of the peaks are assumed", group_memory=_NCCL_GROUP,
    )  # fmt: skip


# float32 is what torch computes unless TF32 is allowed.
DEVICES: dict[str, Device] = {
    each.name: each
    for each in (
        _device("V100-SXM2-32GB", 32, 125e12, 15.7e12, 900e9, "NVIDIA V100 data sheet, 2020"),
        _device("A100-SXM-40GB", 40, 312e12, 19.5e12, 1555e9, "NVIDIA A100 data sheet, 2021"),
        _device("A100-SXM-80GB", 80, 312e12, 19.5e12, 2039e9, "NVIDIA A100 data sheet, 2021"),
        _device("H100-SXM", 80, 989e12, 67e12, 3350e9, "NVIDIA H100 data sheet, 2023"),
        _device("H200", 140, 989e12, 67e12, 4800e9, "NVIDIA H200 data sheet, 2024"),
        _device("MI300X", 192, 1307e12, 163.4e12, 5300e9, "AMD Instinct MI300X data sheet, 2023"),
    )
}

# Of a rank: bytes a second inside a node one way, and of its own adapter; ranks of a node.
_NODES: dict[str, tuple[str, int, float, float]] = {
    "dgx-a100": ("A100-SXM-80GB", 8, 300e9, 25e9),  # NVLink 3, 8 adapters of 200 Gbit/s
    "dgx-h100": ("H100-SXM", 8, 450e9, 50e9),  # NVLink 4, 8 adapters of 400 Gbit/s
    "dgx-h200": ("H200", 8, 450e9, 50e9),
}
CLUSTERS = tuple(_NODES)
_INSIDE, _BETWEEN = 3e-6, 8e-6  # seconds of a message; assumed


def device_named(name: str) -> Device:
    """Return a device of the table.

    Raises:
        InvalidArgumentError: There is none of this name.
    """
    if name not in DEVICES:
        raise InvalidArgumentError(_unknown("device", name, DEVICES))
    return DEVICES[name]


def cluster_named(name: str, ranks: int) -> Cluster:
    """Return nodes of a sort that is in `CLUSTERS`, as many as the ranks need.

    Raises:
        InvalidArgumentError: There is none of this name.
    """
    if name not in _NODES:
        raise InvalidArgumentError(_unknown("cluster", name, _NODES))
    device, size, inside, between = _NODES[name]
    links = [Link(size, _INSIDE, inside)]
    if ranks > size:
        links.append(Link(ranks, _BETWEEN, between))
    return Cluster(ranks, DEVICES[device], tuple(links))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = [each for each in names if name and each.lower().startswith(name.lower())]
    close = close or get_close_matches(name, names, 1, 0.4)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{what} {name!r} is not in the table: {', '.join(names)}{meant}"
