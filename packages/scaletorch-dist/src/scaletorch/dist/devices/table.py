"""The table of devices and backends; other packages may add entries."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..errors import InvalidArgumentError

ENTRY_POINTS = "scaletorch.devices"  # entry point group in which other packages name their entries
OWN_POINTS = {"mpi4py": "mpi.entry:ENTRY"}  # the same for folders of this package

# Features that a backend may lack, and the fallback for each.
FEATURES = {
    "gather": "all_gather",
    "reduce_scatter": "all_to_all, then reduced here",
    "avg": "sum, then divided",
    **dict.fromkeys(
        ("sum", "product", "min", "max", "band", "bor", "bxor"), "all_gather, then reduced here"
    ),
}
_BITS = ("band", "bor", "bxor")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


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
        lacks: Names in `FEATURES` that the backend lacks.
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

# HCCL_BUFFSIZE in CANN's documentation: 200 MB by default; each communicator holds two buffers.
_HCCL_GROUP = 2 * 200 * 2**20

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
        "Huawei Ascend: `pip install torch-npu` of torch's own version, beside CANN",
        "/dev/davinci[0-9]*",
        tags=False,
        sharing=(),  # HCCL's documentation: a communicator takes each device once
        # Ascend/pytorch, ProcessGroupHCCL.cpp: checkSupportedDataType; the documentation of
        # HcclAllReduce, CANN 8.0 to 9.0: no int16 on the 910A, no product of int16 and bfloat16.
        reduces=_dtypes("int8 int16 int32 int64 float16 bfloat16 float32"),
        group_memory=_HCCL_GROUP,
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
)

_added: list[DeviceEntry] = []


def register_device(entry: DeviceEntry) -> None:
    """Add an entry to the table of this process; adding an equal entry again is no error.

    A package can do so for every process with an entry point in the group `scaletorch.devices` that
    names a `DeviceEntry` or a list of them; it is loaded when devices are first looked up.

    Args:
        entry: Its device is preferred to the CPU, but not to devices added before.

    Raises:
        InvalidArgumentError: A field is invalid, or the table has another entry for the backend.

    Example:
        >>> register_device(DeviceEntry("hpu", "hccl_hpu", "habana_frameworks.torch"))
    """
    _check(entry)
    known = {other.backend: other for other in (*DEVICES, *_added)}
    if known.get(entry.backend, entry) != entry:
        raise InvalidArgumentError(
            f"backend {entry.backend!r} is in the table of devices already, as "
            f"{known[entry.backend]}: give the new entry's backend a name of its own"
        )
    if entry.backend not in known:
        _added.append(entry)


def _check(entry: DeviceEntry) -> None:
    if not isinstance(entry, DeviceEntry):
        raise InvalidArgumentError(f"expected a DeviceEntry, not a {type(entry).__name__}")
    for field in ("device", "backend"):
        value = getattr(entry, field)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise InvalidArgumentError(
                f"field {field!r} of a DeviceEntry must be a name in lower case such as 'npu' or "
                f"'hccl', not {value!r}"
            )
    if isinstance(entry.lacks, str) or not set(entry.lacks) <= set(FEATURES):
        raise InvalidArgumentError(
            f"field 'lacks' of the entry of {entry.backend!r} must be a frozenset of "
            f"{', '.join(FEATURES)}, not {entry.lacks!r}"
        )


def device_entries() -> tuple[DeviceEntry, ...]:
    """Return the whole table: built-in accelerators, then added ones, then entries for the CPU."""
    _load_entry_points()
    entries = (*DEVICES, *_added)
    return (
        *(entry for entry in entries if entry.device != "cpu"),
        *(entry for entry in entries if entry.device == "cpu"),
    )


def entry_of_backend(backend: str) -> DeviceEntry | None:
    """Return the table's entry for a backend, or None if it has none."""
    found = next((entry for entry in (*DEVICES, *_added) if entry.backend == backend), None)
    if found is None:
        _load_entry_points()
        found = next((entry for entry in _added if entry.backend == backend), None)
    return found


def _own(entry: Any) -> Any:
    """Convert an entry to this package's `DeviceEntry`: a vendored copy has its own class."""
    if type(entry).__name__ != DeviceEntry.__name__:
        return entry
    return DeviceEntry(**{field.name: getattr(entry, field.name) for field in fields(entry)})


@functools.cache
def _load_entry_points() -> None:
    """Add the entries of installed packages, once; warn of a broken one and skip it."""
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and seldom needed

    package = __package__.rpartition(".")[0]  # a vendored copy has no metadata
    own = [EntryPoint(at, f"{package}.{to}", ENTRY_POINTS) for at, to in OWN_POINTS.items()]
    for point in (*own, *entry_points(group=ENTRY_POINTS)):
        try:
            named = point.load()
            for entry in [named] if is_dataclass(named) else named:
                register_device(_own(entry))
        except Exception as error:  # another package's import may raise anything
            package = point.dist.name if point.dist is not None else "an unknown package"
            warnings.warn(
                f"entry point {point.name!r} ({point.value}) of {package} in the group "
                f"{ENTRY_POINTS!r} gives no device: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
