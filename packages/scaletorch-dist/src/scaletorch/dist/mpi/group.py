# ruff: noqa: D102 - torch.distributed documents the methods
"""A process group of torch.distributed whose collectives use MPI.

The methods have the names and arguments of `torch.distributed.ProcessGroup`; each starts
non-blocking calls and returns a work. C++ code (DistributedDataParallel, functional collectives)
calls them too. MPI gets tensors as raw memory. Calls that only move data send bytes, so every dtype
works. Roots are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ..errors import InvalidArgumentError
from ..wire.backend import as_bytes, as_real, bring_home
from ..wire.recipes import Recipe, as_one, op_name, recipe_for, sum_dtype
from .handles import Engine, Issue, MPIWork

# The stub declares two signatures for most methods; torch.distributed calls only one of them.
_ProcessGroup: Any = c10d.ProcessGroup

Tensors = list[Tensor]

# Names in mpi4py.MPI of the dtypes that MPI reduces, and of its operations.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX",
       "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip
MOST = 2**31 - 1  # elements that every MPI can count


class MPIGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives and messages on one communicator: the group and, at once, its only backend."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, engine: Engine, communicator: Any, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.engine, self.communicator = engine, communicator
        # The options that torch.distributed and `get_timeout` read from a backend.
        self.options = SimpleNamespace(_timeout=options.timeout, backend="mpi4py")
        self._store = options.store
        self._name, self._desc = options.group_id, "undefined"
        self._sequence = 0

    def shutdown(self) -> None:
        """Free the communicator and release the store; a second call does nothing."""
        self._store = None  # else an owner of the group, such as a device mesh, keeps its port open
        if self.communicator != self.engine.mpi.COMM_NULL:
            with self.engine.lock:
                self.communicator.Free()

    def abort(self) -> None:
        """Do nothing: MPI cannot cancel a collective."""

    def _get_backend(self, device: torch.device) -> MPIGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend 'mpi4py' has no communication for device {device}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return "mpi4py"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        name: str = self._name
        return name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: each rank counts its own calls."""

    def _start(
        self,
        name: str,
        issue: Issue,
        results: Tensors,
        finish: Callable[[], None] | None = None,
        *,
        opts: Any = None,
        expected: int | None = None,
    ) -> MPIWork:
        seconds: float = self.options._timeout.total_seconds()
        asked = getattr(opts, "timeout", None)
        if asked is not None and asked.total_seconds() > 0:
            seconds = asked.total_seconds()
        self._sequence += 1
        work = MPIWork(self.engine, self, name, issue, results, finish, expected, seconds)
        return self.engine.start(work)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        content = flat(tensors[0])

        def issue(mpi: Any, comm: Any) -> list[Any]:
            return [comm.Ibcast(raw(mpi, content), root=opts.rootRank)]

        finish = partial(put, tensors[0], content)
        return self._start("broadcast", issue, tensors, finish, opts=opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        op = c10d.ReduceOp.SUM if opts is None else opts.reduceOp
        packed = [pack(flat(data), op) for data in tensors]

        def issue(mpi: Any, comm: Any) -> list[Any]:
            return [
                comm.Iallreduce(mpi.IN_PLACE, typed(mpi, data), op=getattr(mpi, OPS[recipe.run]))
                for data, recipe in packed
            ]

        finish = partial(self._unpack, tensors, packed)
        return self._start("all_reduce", issue, tensors, finish, opts=opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        mine = self.rank() == opts.rootRank  # other ranks keep their values
        return self.allreduce(tensors if mine else [data.clone() for data in tensors], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        sent, received, counts = [], [], []
        for shards in inputs:
            self._check_count(shards, "reduce_scatter")
            data, recipe = pack(torch.cat([*map(flat, shards)]), opts.reduceOp)
            sent.append(data)
            received.append((data.new_empty(shards[self.rank()].numel()), recipe))
            counts.append([each.numel() * (2 if data.is_complex() else 1) for each in shards])

        def issue(mpi: Any, comm: Any) -> list[Any]:
            return [
                comm.Ireduce_scatter(
                    typed(mpi, data), typed(mpi, shard), numbers, op=getattr(mpi, OPS[recipe.run])
                )
                for data, (shard, recipe), numbers in zip(sent, received, counts, strict=True)
            ]

        finish = partial(self._unpack, outputs, received)
        return self._start("reduce_scatter", issue, outputs, finish, opts=opts)

    def _unpack(self, targets: Tensors, packed: Sequence[tuple[Tensor, Recipe]]) -> None:
        """Unpack reduced tensors into the targets."""
        for target, (data, recipe) in zip(targets, packed, strict=True):
            put(target, recipe.unpack(data, self.size()))

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any) -> MPIWork:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MPIWork:
        shards = [list(data.detach().reshape(self.size(), -1).unbind(0)) for data in inputs]
        return self.reduce_scatter(outputs, shards, opts)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> MPIWork:
        return self.all_gather_single_coalesced([output], [data], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        for output, data in zip(outputs, inputs, strict=True):
            if output.numel() != data.numel() * self.size() or output.dtype != data.dtype:
                raise InvalidArgumentError(
                    f"all_gather of {tuple(data.shape)} {data.dtype} over {self.size()} ranks does "
                    f"not fit an output of {tuple(output.shape)} {output.dtype}"
                )
        ends = [(flat(data), flat(output)) for output, data in zip(outputs, inputs, strict=True)]

        def issue(mpi: Any, comm: Any) -> list[Any]:
            size = self.size()
            return [comm.Iallgather(raw(mpi, data), raw(mpi, rows, size)) for data, rows in ends]

        def finish() -> None:
            for output, (_, rows) in zip(outputs, ends, strict=True):
                put(output, rows)

        return self._start("all_gather", issue, outputs, finish, opts=opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> MPIWork:
        self._check_count(outputs[0], "all_gather")
        sent = [inputs[0].nbytes] * self.size(), [0] * self.size()
        return self._exchange("all_gather", outputs[0], sizes(outputs[0]), inputs, *sent, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> MPIWork:
        sent, shards, received = self._with_root(inputs[0], outputs, "gather", opts)
        return self._exchange("gather", shards, received, inputs, sent, opts=opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        received, shards, sent = self._with_root(outputs[0], inputs, "scatter", opts)
        return self._exchange("scatter", outputs, received, shards, sent, opts=opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MPIWork:
        for shards in (outputs, inputs):
            self._check_count(shards, "all_to_all")
        ends = outputs, sizes(outputs), inputs, sizes(inputs)
        return self._exchange("all_to_all", *ends, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        data: Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> MPIWork:
        received = row_sizes(output, output_sizes or [], self.size(), "output")
        sent = row_sizes(data, input_sizes or [], self.size(), "input")
        return self._exchange("all_to_all", [output], received, [data], sent, opts=opts)

    def _with_root(
        self, data: Tensor, lists: list[Tensors], call: str, opts: Any
    ) -> tuple[list[int], Tensors, list[int]]:
        """Return the bytes between each rank and the root, the root's list, and its bytes."""
        root = opts.rootRank
        bytes_of = [data.nbytes if rank == root else 0 for rank in range(self.size())]
        if self.rank() != root:
            return bytes_of, [], [0] * self.size()
        self._check_count(lists[0], call)
        return bytes_of, lists[0], sizes(lists[0])

    def _exchange(
        self,
        name: str,
        outputs: Tensors,
        received: list[int],
        inputs: Tensors,
        sent: list[int],
        starts: list[int] | None = None,
        opts: Any = None,
    ) -> MPIWork:
        """Send a slice of the joined inputs to each rank, and fill the outputs; sizes in bytes."""
        content, memory = joined(inputs), joined(outputs)

        def issue(mpi: Any, comm: Any) -> list[Any]:  # without starts the slices are adjacent
            slices = [raw(mpi, content)[0], sent, starts, mpi.BYTE]
            return [comm.Ialltoallv(slices, [raw(mpi, memory)[0], received, None, mpi.BYTE])]

        def finish() -> None:
            for output, piece in zip(outputs, memory.split(sizes(outputs)), strict=True):
                put(output, piece.view(output.dtype))

        return self._start(name, issue, outputs, finish, opts=opts)

    def _check_count(self, shards: Sequence[Tensor], call: str) -> None:
        if len(shards) != self.size():
            raise InvalidArgumentError(
                f"{call} needs {self.size()} tensors, one per rank, got {len(shards)}"
            )

    def barrier(self, opts: Any = None) -> MPIWork:
        return self._start("barrier", lambda mpi, comm: [comm.Ibarrier()], [], opts=opts)

    def send(self, tensors: Tensors, dst: int, tag: int) -> MPIWork:
        content = flat(tensors[0])

        def issue(mpi: Any, comm: Any) -> list[Any]:
            return [comm.Isend(raw(mpi, content), dest=dst, tag=tag)]

        return self._start("send", issue, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> MPIWork:
        content = flat(tensors[0])

        def issue(mpi: Any, comm: Any) -> list[Any]:
            return [comm.Irecv(raw(mpi, content), source=src, tag=tag)]

        finish = partial(put, tensors[0], content)
        expected = content.nbytes if content.nbytes <= MOST else None  # MPI cannot count more
        return self._start("recv", issue, tensors, finish, expected=expected)

    # Names in torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def flat(data: Tensor) -> Tensor:
    """Return a tensor flat and contiguous; copy only if necessary."""
    if not data.is_cpu:
        raise InvalidArgumentError(
            f"backend 'mpi4py' moves CPU tensors, not {data.device.type}: copy it to the CPU, or "
            "use scaletorch.dist's calls, which do"
        )
    if data.layout is not torch.strided or data.is_quantized:
        raise InvalidArgumentError("backend 'mpi4py' moves dense tensors only")
    return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors as one tensor; a single contiguous tensor is not copied."""
    return as_one([as_bytes(flat(data)) for data in tensors] or [torch.empty(0, dtype=torch.uint8)])


def raw(mpi: Any, data: Tensor, shards: int = 1) -> list[Any]:
    """Describe a flat tensor's bytes to MPI: memory, count of one of the shards, and type."""
    memory, count = mpi.buffer.fromaddress(data.data_ptr(), data.nbytes), data.nbytes // shards
    if count > MOST and count % 8 == 0:  # Open MPI 5 has 32-bit counts
        return [memory, count // 8, mpi.INT64_T]
    return [memory, count, mpi.BYTE]


def typed(mpi: Any, data: Tensor) -> list[Any]:
    """Describe a flat packed tensor's elements to MPI."""
    numbers = as_real(data)
    kind = getattr(mpi, _TYPES[numbers.dtype])
    return [mpi.buffer.fromaddress(numbers.data_ptr(), numbers.nbytes), numbers.numel(), kind]


def pack(data: Tensor, op: Any) -> tuple[Tensor, Recipe]:
    """Pack a flat tensor for a reduction; return it and its recipe."""
    recipe = recipe_for(op_name(op), data.dtype)
    packed = recipe.pack(data)
    return packed.to(sum_dtype(packed.dtype)), recipe  # MPI has no 16-bit floats


def put(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into `target` unless they share memory."""
    bring_home(target.detach(), source.view(target.shape))


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each tensor."""
    return [data.nbytes for data in tensors]


def row_sizes(data: Tensor, rows_of: Sequence[int], ranks: int, name: str) -> list[int]:
    """Return the bytes for each rank, by numbers of rows or in equal shares."""
    rows = data.shape[0] if data.dim() else 0
    if not rows_of and rows % ranks:
        raise InvalidArgumentError(f"all_to_all: {ranks} ranks do not divide {name} dim 0, {rows}")
    if rows_of and (len(rows_of) != ranks or sum(rows_of) != rows):
        raise InvalidArgumentError(
            f"all_to_all: {name} sizes {list(rows_of)} are not {rows} rows for {ranks} ranks"
        )
    row = data.nbytes // rows if rows else 0
    return [count * row for count in rows_of or [rows // ranks] * ranks]
