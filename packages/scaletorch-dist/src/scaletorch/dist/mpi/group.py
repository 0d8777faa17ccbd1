# ruff: noqa: D102 - torch.distributed documents the methods
"""A process group of torch.distributed whose collectives use MPI.

The methods have the names and arguments of `torch.distributed.ProcessGroup`; each starts
non-blocking calls and returns a work. C++ code (DistributedDataParallel, functional collectives)
calls them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from . import collectives
from .handles import Call, Engine, MPIWork, join_calls

# The stub declares two signatures for most methods; torch.distributed calls only one of them.
_ProcessGroup: Any = c10d.ProcessGroup

Tensors = list[Tensor]


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

    def _start(self, make: Callable[..., Call], *args: Any, opts: Any = None) -> MPIWork:
        seconds: float = self.options._timeout.total_seconds()
        asked = getattr(opts, "timeout", None)
        if asked is not None and asked.total_seconds() > 0:
            seconds = asked.total_seconds()
        mpi, comm = self.engine.mpi, self.communicator
        self._sequence += 1
        return self.engine.start(lambda: make(mpi, comm, *args), seconds, self)

    def _start_several(
        self, make: Callable[..., Call], *columns: Sequence[Any], opts: Any = None
    ) -> MPIWork:
        def several(mpi: Any, comm: Any) -> Call:
            rows = zip(*columns, strict=True)
            return join_calls([make(mpi, comm, *row) for row in rows])

        return self._start(several, opts=opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        return self._start(collectives.broadcast, tensors[0], opts.rootRank, opts=opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        op = c10d.ReduceOp.SUM if opts is None else opts.reduceOp
        each = [op] * len(tensors)
        return self._start_several(collectives.all_reduce, tensors, each, opts=opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        return self._start(collectives.reduce, tensors[0], opts.reduceOp, opts.rootRank, opts=opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> MPIWork:
        return self._start(collectives.all_gather, outputs[0], inputs[0], opts=opts)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> MPIWork:
        return self.all_gather_single_coalesced([output], [data], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        return self._start_several(collectives.all_gather_single, outputs, inputs, opts=opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> MPIWork:
        shards = outputs[0] if outputs else []
        return self._start(collectives.gather, shards, inputs[0], opts.rootRank, opts=opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        shards = inputs[0] if inputs else []
        return self._start(collectives.scatter, outputs[0], shards, opts.rootRank, opts=opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        own, shards = outputs[0], inputs[0]
        return self._start(collectives.reduce_scatter, own, shards, opts.reduceOp, opts=opts)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any) -> MPIWork:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MPIWork:
        shards = [list(data.detach().reshape(self.size(), -1).unbind(0)) for data in inputs]
        ops = [opts.reduceOp] * len(shards)
        return self._start_several(collectives.reduce_scatter, outputs, shards, ops, opts=opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MPIWork:
        return self._start(collectives.all_to_all, outputs, inputs, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        data: Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> MPIWork:
        sizes = output_sizes or [], input_sizes or []
        return self._start(collectives.all_to_all_single, output, data, *sizes, opts=opts)

    def barrier(self, opts: Any = None) -> MPIWork:
        return self._start(collectives.barrier, opts=opts)

    def send(self, tensors: Tensors, dst: int, tag: int) -> MPIWork:
        return self._start(collectives.send, tensors[0], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> MPIWork:
        return self._start(collectives.receive, tensors[0], src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MPIWork:
        return self._start(collectives.receive, tensors[0], self.engine.mpi.ANY_SOURCE, tag)

    # Names in torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
