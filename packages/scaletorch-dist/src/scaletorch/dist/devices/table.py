"""The one table of devices and backends, to which anyone may add."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..errors import InvalidArgumentError

ENTRY_POINTS = "scaletorch.devices"  # group in which other packages name their entries
OWN_POINTS = {"mpi4py": "mpi.entry:ENTRY"}  # the same for folders of this package's own

# What a backend may lack, and what is done instead.
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


# What NCCL, Gloo and most others add up, and all that the calls of this package ask of a backend.
REDUCED = _dtypes("uint8 int8 int32 int64 float16 bfloat16 float32 float64")


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A kind of device, its backend and how to come by them.

    Attributes:
        device: Name as in `torch.device`.
        backend: Name as in `torch.distributed`; each is in the table once.
        plugin: Module that brings both to torch, or None if torch has them.
        lacks: Of `FEATURES`, those that are to be done another way.
        source: Where the backend comes from, for messages.
        nodes: File pattern of the hardware's device nodes; "" for none.
        activate: Called, once the plugin is imported, before the backend is first used: it
            registers the backend with torch.distributed where the plugin does not.
        instead: Backend that takes this one's place where torch was built without it.
        alone: Why it cannot stand beside another backend in a group; "" if it can.
        check: Called with rank and world size before the ranks meet: it raises if the backend would
            see other ranks.
        tags: Whether messages of one pair of ranks are told apart by their tags; if not, they are
            matched in the order of sending, and tags other than 0 are refused.
        sharing: Environment variables, (name, value), with which several ranks can use one device
            of a backend that otherwise takes one rank for each; `{rank}` in a value stands for the
            rank. () if there is no way. None if the backend needs none, or if it is not known.
        reduces: Dtypes that the backend sums and takes minima and maxima of. Tensors of the others
            in `REDUCED` are gathered, and each rank reduces them in rank order. So a float64 sum is
            as exact as float64 is on the tensor's device; a tensor of the host is summed there.
        variables: Environment variables, (name, value), that each of several ranks gets before it
            first uses its device, unless it has them.
        group_memory: Bytes of device memory that one communicator holds, by default.

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


# Run on one H200 with NCCL 2.28.9: each rank is on a host of its own, and hosts are connected by
# sockets of the loopback interface alone; buffers and channels are few, since all are on one card.
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

# By default CUDA loads a kernel when it is first launched, and may wait for the device to do all it
# has to: also for a receive, whose sender may wait for this rank. See "Lazy loading" in NVIDIA's
# CUDA programming guide, among the potential hazards.
#
# torch's flight recorder keeps the last calls, which the guard writes beside its ledgers.
_CUDA_VARIABLES = (("CUDA_MODULE_LOADING", "EAGER"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))

# NVIDIA/nccl#964: 544 and 688 MB for each group on an A100. Of RCCL and others none is known.
NCCL_GROUP = 512 * 2**20

# HCCL_BUFFSIZE in CANN's documentation: 200 MB by default, and each communicator holds two such
# buffers.
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
        # intel/torch-xpu-ops, src/xccl/ProcessGroupXCCL.cpp: xcclDatatypes, xcclOps; averages are
        # there since oneCCL 2021.15 alone.
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
        sharing=(),  # HCCL's documentation: no device twice in a communicator
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
        # Cambricon/torch_mlu, process_group_cncl.cpp: cncl_data_type has float64 as cnclFloat, so
        # that it would be added in float32 without a word. Older releases have int64 as int32.
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
        # MooreThreads/torch_musa, ProcessGroupMCCL.cpp: mcclDataType; bfloat16 where MCCL has it.
        reduces=REDUCED,
    ),
    DeviceEntry("cpu", "gloo"),
    DeviceEntry(
        "cpu",
        "mpi",
        lacks=frozenset({"reduce_scatter", "avg", *_BITS}),
        source="a torch that was built from source against an MPI library; wheels have none",
        instead="mpi4py",
        # torch, ProcessGroupMPI.cpp: mpiDatatype, without 16-bit floats; its int8 is MPI_CHAR,
        # which the MPI standard knows as letters and adds up nowhere.
        reduces=_dtypes("uint8 int16 int32 int64 float32 float64"),
    ),
)

_added: list[DeviceEntry] = []


def register_device(entry: DeviceEntry) -> None:
    """Add an entry to the table of this process; the very same entry again is no error.

    A package can do so for every process by an entry point of the group `scaletorch.devices` that
    names a `DeviceEntry` or a list of them; it is loaded when devices are first asked for.

    Args:
        entry: Its device is preferred to the CPU, and not to those that stand before.

    Raises:
        InvalidArgumentError: A field makes no sense, or the backend is there already.

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
    """Return the whole table: accelerators as built in, then those added, and the CPU last."""
    _load_entry_points()
    entries = (*DEVICES, *_added)
    return (
        *(entry for entry in entries if entry.device != "cpu"),
        *(entry for entry in entries if entry.device == "cpu"),
    )


def entry_of_backend(backend: str) -> DeviceEntry | None:
    """The table's entry for a backend, or None for one that it does not know."""
    found = next((entry for entry in (*DEVICES, *_added) if entry.backend == backend), None)
    if found is None:
        _load_entry_points()
        found = next((entry for entry in _added if entry.backend == backend), None)
    return found


def _own(entry: Any) -> Any:
    """Return an entry as this copy of the package has them: others make theirs with another."""
    if type(entry).__name__ != DeviceEntry.__name__:
        return entry
    return DeviceEntry(**{field.name: getattr(entry, field.name) for field in fields(entry)})


@functools.cache
def _load_entry_points() -> None:
    """Add what installed packages name, once; a broken one is warned of and left out."""
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and seldom needed

    package = __package__.rpartition(".")[0]  # a copy of it in another project has no metadata
    own = [EntryPoint(at, f"{package}.{to}", ENTRY_POINTS) for at, to in OWN_POINTS.items()]
    for point in (*own, *entry_points(group=ENTRY_POINTS)):
        try:
            named = point.load()
            for entry in [named] if is_dataclass(named) else named:
                register_device(_own(entry))
        except Exception as error:  # whatever another package's import raises
            package = point.dist.name if point.dist is not None else "an unknown package"
            warnings.warn(
                f"entry point {point.name!r} ({point.value}) of {package} in the group "
                f"{ENTRY_POINTS!r} gives no device: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
