"""The table of devices and backends; other packages may add entries."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import InvalidArgumentError

ENTRY_POINTS = "scaletorch.devices"  # entry point group in which other packages name their entries

_BITS = ("band", "bor", "bxor")
# Features that a backend may lack; each is then done another way.
FEATURES = frozenset(("gather", "reduce_scatter", "avg", "sum", "product", "min", "max", *_BITS))


def _dtypes(names: str) -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in names.split())


# Dtypes that NCCL, Gloo and most others reduce; this package asks backends to reduce no others.
REDUCED = _dtypes("uint8 int8 int32 int64 float16 bfloat16 float32 float64")


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device type, its backend, and where to get them.

    Attributes:
        device: Name as in `torch.device`.
        backend: Name as in `torch.distributed`; unique in the table.
        plugin: Module that adds both to torch, or None if torch has them.
        lacks: What the backend lacks: gather, reduce_scatter, or operations of a reduction.
        source: Where to get the backend, for messages.
        nodes: Glob pattern of the hardware's device files; "" for none.
        activate: Called after the plugin is imported and before the backend is first used;
            registers the backend with torch.distributed if the plugin does not.
        instead: Backend that replaces this one if torch was built without it.
        alone: Why it cannot be combined with another backend in a group; "" if it can.
        check: Called with rank and world size before the ranks meet; raises if the backend would
            see other ranks.
        tags: Whether the backend distinguishes messages between two ranks by tag; if not, they are
            matched in the order of sending, and tags other than 0 are refused.
        sharing: Environment variables, as (name, value) pairs, that let several ranks use one
            device of a backend that otherwise takes one rank per device; `{rank}` in a value stands
            for the rank. () if it is impossible. None if unnecessary or unknown.
        reduces: Dtypes for which the backend computes sum, min and max. Tensors of other dtypes in
            `REDUCED` are gathered, and each rank reduces them in rank order on the tensor's own
            device, so a float64 sum is as exact as float64 on that device.
        variables: Environment variables, as (name, value) pairs, that a rank sets before it first
            uses its device, if it is not alone and they are unset.
        group_memory: Bytes of device memory that one communicator holds by default.
    """

    device: str
    backend: str
    plugin: str | None = None
    lacks: frozenset[str] = frozenset()
    source: str = "torch's own wheels"
    nodes: str = ""
    activate: Callable[[], None] | None = None
    instead: str = ""
    alone: str = ""
    check: Callable[[int, int], None] | None = None
    tags: bool = True
    sharing: tuple[tuple[str, str], ...] | None = None
    reduces: frozenset[torch.dtype] = REDUCED
    variables: tuple[tuple[str, str], ...] = ()
    group_memory: int = 0


# Tested on one H200 with NCCL 2.28.9. NCCL sees each rank on its own host, and hosts connected by
# loopback sockets only; buffers and channels are few, since all ranks share one card.
_NCCL_SHARING = (
    ("NCCL_HOSTID", "scaletorch-{rank}"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_SOCKET_IFNAME", "lo"),
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_MNNVL_ENABLE", "0"),
    ("NCCL_CUMEM_ENABLE", "0"),
    ("NCCL_MAX_NCHANNELS", "2"),
    ("NCCL_BUFFSIZE", "1048576"),
)

# By default CUDA loads a kernel at its first launch, which may wait for all queued work of the
# device. That includes a receive whose sender may be waiting for this rank: a deadlock. See the
# potential hazards of "Lazy loading" in NVIDIA's CUDA programming guide.
#
# torch's flight recorder keeps the last calls, which torch writes at a timeout.
_CUDA_VARIABLES = (("CUDA_MODULE_LOADING", "EAGER"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))

# NVIDIA/nccl#964: 544 and 688 MB per group on an A100. No numbers are known for RCCL and others.
NCCL_GROUP = 512 * 2**20


def _mpi(function: str, *args: int) -> None:
    """Call a function of the MPI backend, which is seldom needed and so imported late."""
    getattr(importlib.import_module("..mpi.register", __package__), function)(*args)


DEVICES: tuple[DeviceEntry, ...] = (
    DeviceEntry(
        "cuda",
        "nccl",
        lacks=frozenset(_BITS),
        source="torch's CUDA wheels",
        tags=False,
        sharing=_NCCL_SHARING,
        # torch, csrc/distributed/c10d/NCCLUtils.cpp: getNcclDataType.
        reduces=REDUCED,
        variables=_CUDA_VARIABLES,
        group_memory=NCCL_GROUP,
    ),
    DeviceEntry(
        "xpu",
        "xccl",
        lacks=frozenset({"avg", *_BITS}),
        source="torch's XPU wheels",
        tags=False,
        # intel/torch-xpu-ops, src/xccl/ProcessGroupXCCL.cpp: xcclDatatypes, xcclOps; averages need
        # oneCCL 2021.15 or newer.
        reduces=REDUCED,
    ),
    DeviceEntry(
        "npu",
        "hccl",
        "torch_npu",
        frozenset({"gather", "avg", *_BITS}),
        "Huawei Ascend: CANN, and `pip install torch-npu` in the version of torch",
        "/dev/davinci[0-9]*",
        tags=False,
        sharing=(),  # HCCL's documentation: a communicator takes each device once
        # Ascend/pytorch, ProcessGroupHCCL.cpp: checkSupportedDataType; the documentation of
        # HcclAllReduce, CANN 8.0 to 9.0: no int16 on the 910A, no product of int16 and bfloat16.
        reduces=_dtypes("int8 int16 int32 int64 float16 bfloat16 float32"),
        group_memory=2 * 200 * 2**20,  # HCCL_BUFFSIZE in CANN's documentation: two of 200 MB
    ),
    DeviceEntry(
        "mlu",
        "cncl",
        "torch_mlu",
        frozenset({"gather", "avg", *_BITS}),
        "Cambricon's own wheels with the Neuware SDK (developer.cambricon.com), from no registry",
        "/dev/cambricon_dev[0-9]*",
        tags=False,
        # Cambricon/torch_mlu, process_group_cncl.cpp: cncl_data_type maps float64 to cnclFloat,
        # which would silently sum in float32. Older releases map int64 to int32.
        reduces=_dtypes("uint8 int8 int32 int64 float16 bfloat16 float32"),
    ),
    DeviceEntry(
        "musa",
        "mccl",
        "torch_musa",
        frozenset({"gather", "avg", *_BITS}),
        "Moore Threads' own wheels with the MUSA SDK (developer.mthreads.com), from no registry",
        "/dev/mtgpu*[0-9]*",
        tags=False,
        # MooreThreads/torch_musa, ProcessGroupMCCL.cpp: mcclDataType; bfloat16 if MCCL has it.
        reduces=REDUCED,
    ),
    DeviceEntry("cpu", "gloo"),
    DeviceEntry(
        "cpu",
        "mpi",
        lacks=frozenset({"reduce_scatter", "avg", *_BITS}),
        source="a torch that was built from source against an MPI library; wheels have none",
        instead="mpi4py",
        # torch, ProcessGroupMPI.cpp: mpiDatatype has no 16-bit floats; it maps int8 to MPI_CHAR,
        # a character type for which the MPI standard defines no reduction.
        reduces=_dtypes("uint8 int16 int32 int64 float32 float64"),
    ),
    DeviceEntry(
        "cpu",
        "mpi4py",
        "mpi4py",
        source="Open MPI or MPICH, and `pip install scaletorch-dist[mpi]`",
        activate=functools.partial(_mpi, "register_backend"),
        alone="MPI over mpi4py serves a whole group and cannot be combined with another backend: "
        "use 'mpi' alone (tensors of devices are copied through the CPU), or a torch that was "
        "built with MPI",
        check=functools.partial(_mpi, "check_world"),
    ),
)

_added: list[DeviceEntry] = []


def register_device(entry: DeviceEntry) -> None:
    """Add an entry to the table of this process; adding an equal entry again is no error.

    A package can do so for every process with an entry point in the group `scaletorch.devices` that
    names a `DeviceEntry`; it is loaded when devices are first looked up.

    Args:
        entry: Its device is preferred to the CPU, but not to devices added before.

    Raises:
        InvalidArgumentError: `entry` is no `DeviceEntry`, or the table has another for the backend.

    Example:
        >>> register_device(DeviceEntry("hpu", "hccl_hpu", "habana_frameworks.torch"))
    """
    if not isinstance(entry, DeviceEntry):
        raise InvalidArgumentError(f"expected a DeviceEntry, not a {type(entry).__name__}")
    if isinstance(entry.lacks, str) or not set(entry.lacks) <= FEATURES:
        raise InvalidArgumentError(
            f"field 'lacks' of the entry of {entry.backend!r} must be a frozenset of "
            f"{', '.join(sorted(FEATURES))}, not {entry.lacks!r}"
        )
    known = {other.backend: other for other in (*DEVICES, *_added)}
    if known.get(entry.backend, entry) != entry:
        raise InvalidArgumentError(
            f"backend {entry.backend!r} is in the table of devices already, as "
            f"{known[entry.backend]}: give the new entry's backend a name of its own"
        )
    if entry.backend not in known:
        _added.append(entry)


def device_entries() -> tuple[DeviceEntry, ...]:
    """Return the whole table: built-in accelerators, then added ones, then entries for the CPU."""
    _load_entry_points()
    return tuple(sorted((*DEVICES, *_added), key=lambda entry: entry.device == "cpu"))


def entry_of_backend(backend: str) -> DeviceEntry | None:
    """Return the table's entry for a backend, or None if it has none."""
    builtin = next((entry for entry in DEVICES if entry.backend == backend), None)
    if builtin is not None:
        return builtin  # without the slow look for entry points
    return next((entry for entry in device_entries() if entry.backend == backend), None)


@functools.cache
def _load_entry_points() -> None:
    """Add the entries of installed packages, once; warn of a broken one and skip it."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=ENTRY_POINTS):
        try:
            entry = point.load()
            # A vendored copy of this package has its own class, for its own table.
            if isinstance(entry, DeviceEntry) or type(entry).__name__ != DeviceEntry.__name__:
                register_device(entry)
        except Exception as error:  # another package's import may raise anything
            package = point.dist.name if point.dist is not None else "an unknown package"
            warnings.warn(
                f"entry point {point.name!r} ({point.value}) of {package} in the group "
                f"{ENTRY_POINTS!r} gives no device: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
