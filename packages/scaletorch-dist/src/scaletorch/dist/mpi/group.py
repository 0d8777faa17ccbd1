"""A process group of torch.distributed whose collectives are MPI's.

The methods' names and arguments are those of `torch.distributed.ProcessGroup`; each starts
non-blocking calls and returns a work. C++ (DistributedDataParallel, functional collectives) calls
them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from . import collectives, messages
from .members import MPIMembers
from .progress import Call
from .work import MPIWork

Tensors = list[Tensor]


class MPIGroup(MPIMembers):
    """Collectives and messages of the members of one communicator."""

    def _start(self, make: Callable[..., Call], *args: Any, opts: Any = None) -> MPIWork:
        seconds: float = self.options._timeout.total_seconds()
        asked = getattr(opts, "timeout", None)
        if asked is not None and asked.total_seconds() > 0:
            seconds = asked.total_seconds()
        mpi, comm = self.engine.mpi, self.communicator
        self._sequence += 1
        return MPIWork(self.engine, self.engine.start(lambda: make(mpi, comm, *args)), seconds)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        """See `torch.distributed.broadcast`."""
        return self._start(collectives.broadcast, tensors[0], opts.rootRank, opts=opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        """See `torch.distributed.all_reduce`."""
        op = c10d.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._start(collectives.all_reduce, tensors, op, opts=opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        """See `torch.distributed.reduce`."""
        return self._start(collectives.reduce, tensors[0], opts.reduceOp, opts.rootRank, opts=opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> MPIWork:
        """See `torch.distributed.all_gather`."""
        return self._start(collectives.all_gather, outputs, inputs, opts=opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        """Gather several tensors: `outputs[rank][i]` is rank's `inputs[i]`."""
        by_input = [list(column) for column in zip(*outputs, strict=True)]
        return self._start(collectives.all_gather, by_input, inputs, opts=opts)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> MPIWork:
        """See `torch.distributed.all_gather_into_tensor`."""
        return self._start(collectives.all_gather_single, [output], [data], opts=opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        """Gather several tensors, each into one."""
        return self._start(collectives.all_gather_single, outputs, inputs, opts=opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> MPIWork:
        """See `torch.distributed.gather`."""
        parts = outputs[0] if outputs else []
        return self._start(collectives.gather, parts, inputs[0], opts.rootRank, opts=opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        """See `torch.distributed.scatter`."""
        parts = inputs[0] if inputs else []
        return self._start(collectives.scatter, outputs[0], parts, opts.rootRank, opts=opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MPIWork:
        """See `torch.distributed.reduce_scatter`; entries may differ in size."""
        return self._start(collectives.reduce_scatter, outputs, inputs, opts.reduceOp, opts=opts)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any) -> MPIWork:
        """See `torch.distributed.reduce_scatter_tensor`."""
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MPIWork:
        """Reduce and scatter several tensors, each in equal parts."""
        parts = [list(data.detach().reshape(self.size(), -1).unbind(0)) for data in inputs]
        return self._start(collectives.reduce_scatter, outputs, parts, opts.reduceOp, opts=opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MPIWork:
        """See `torch.distributed.all_to_all`: what is received comes first."""
        return self._start(collectives.all_to_all, outputs, inputs, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        data: Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> MPIWork:
        """See `torch.distributed.all_to_all_single`; sizes are of dim 0."""
        sizes = output_sizes or [], input_sizes or []
        return self._start(collectives.all_to_all_single, output, data, *sizes, opts=opts)

    def barrier(self, opts: Any = None) -> MPIWork:
        """See `torch.distributed.barrier`."""
        return self._start(collectives.barrier, opts=opts)

    def send(self, tensors: Tensors, dst: int, tag: int) -> MPIWork:
        """See `torch.distributed.isend`; `dst` is a rank of this group."""
        return self._start(messages.send, tensors[0], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> MPIWork:
        """See `torch.distributed.irecv`; `src` is a rank of this group."""
        return self._start(messages.receive, tensors[0], src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MPIWork:
        """Receive from whichever member sends first."""
        return self._start(messages.receive, tensors[0], self.engine.mpi.ANY_SOURCE, tag)

    # torch before 2.13 calls these by other names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
