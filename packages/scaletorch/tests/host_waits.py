"""Counts how often the host waits for a device: seen by operations, so any stand-in device will do.

A tensor that never was on the device costs nothing to read. What reads or fills one that is, in a
way that a queue of kernels cannot take, is a wait, also where the stand-in itself does not wait.
"""

import traceback
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or whose shape, depends on values: the host waits for these.
READS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave", "nonzero_numpy",
}  # fmt: skip
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
SHOWN = 6  # frames of a stack


class HostWaits(TorchDispatchMode):
    """Notes every wait inside it, on this thread and those that its modes are carried to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if self._waits(name, func, args, kwargs):
            self.note(name)
        return func(*args, **kwargs)

    def note(self, name):
        frames = [f for f in traceback.extract_stack() if "scaletorch" in f.filename]
        frames = [f for f in frames if not f.filename.endswith("host_waits.py")][-SHOWN:]
        places = [f"{f.filename.rpartition('/scaletorch/')[2]}:{f.lineno}" for f in frames]
        self.found.append(f"{name}: {' > '.join(places)}")

    def _waits(self, name, func, args, kwargs):
        if name in READS:
            sized = kwargs.get("output_size") is not None  # repeat_interleave
            return not sized and any(_is_there(x) for x in tree_leaves((args, kwargs)))
        if name in INDEXED:
            indices = [x for x in args[1] if x is not None]
            moved = any(x.dtype in (torch.bool, torch.uint8) or x.is_cpu for x in indices)
            return _is_there(args[0]) and moved
        if name == "_to_copy":
            target = kwargs.get("device") or args[0].device
            return _crosses(args[0].device, torch.device(target), kwargs.get("non_blocking"))
        if name == "copy_":
            blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            return _crosses(args[1].device, args[0].device, blocking)
        return False


@contextmanager
def host_waits():
    """Yield what collects the waits of the host."""
    waits = HostWaits()
    made = torch.tensor

    def tensor(data, *args, device=None, **kwargs):
        if device is not None and torch.device(device).type != "cpu":
            waits.note("tensor")  # a copy from memory that is not pinned
        return made(data, *args, device=device, **kwargs)

    with patch.object(torch, "tensor", tensor), waits:
        yield waits


def _is_there(value):
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")


def _crosses(source, target, non_blocking):
    return not non_blocking and (source.type == "cpu") != (target.type == "cpu")
