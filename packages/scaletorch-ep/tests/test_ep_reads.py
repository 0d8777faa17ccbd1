"""The host waits for a device once in a call of experts, and never in backward.

A tensor of this host says here that it is on a device, so that what runs is what would run there.
"""

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from called_blocks import EXPERTS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.expert_parallel import apply_expert_parallel

TOP_K, HIDDEN, WIDTH, TOKENS = 3, 16, 8, 7
READS = {  # operations whose result the host needs, or whose size depends on values
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select",
    "_unique2", "unique_dim", "unique_consecutive",
}  # fmt: skip


class Grouped(nn.Module):
    """Experts that multiply all of their rows at once, and say on the device where each ends."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        shapes = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
        self.up, self.down = (nn.Parameter(torch.randn(each) / 3) for each in shapes)

    def forward(self, hidden, top_k_index, top_k_weights):
        numbers, order = top_k_index.flatten().sort()
        counts = numbers.new_zeros(self.num_experts).scatter_add_(0, numbers, numbers * 0 + 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        token = order // top_k_index.shape[1]
        inner = F.grouped_mm(hidden[token], self.up, offs=ends).tanh()
        rows = F.grouped_mm(inner, self.down, offs=ends)
        rows = rows * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, token, rows)


class Counted(TorchDispatchMode):
    """Counts what makes the host wait."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __enter__(self):
        patch = self.patch = pytest.MonkeyPatch()
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, self._reading(name, getattr(torch.Tensor, name)))
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        self.patch.undo()

    def _reading(self, name, own):
        def read(*args, **kwargs):
            self.reads.append(name)
            return own(*args, **kwargs)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def _routed():
    """Return tokens of this rank, which expert each goes to, and weights."""
    torch.manual_seed(3 + c10d.get_rank())
    index = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K).requires_grad_()
    return torch.randn(TOKENS, HIDDEN).requires_grad_(), index, weights


def _reads():
    """Return what the host reads in a second call, and in its backward."""
    torch.manual_seed(0)
    group = c10d.group.WORLD
    experts = apply_expert_parallel(nn.ModuleDict({"experts": Grouped()}), group=group)["experts"]
    experts(*_routed())  # where ranks agree
    given = _routed()
    with Counted() as forward:
        results = experts(*given)
    with Counted() as backward:
        results.sum().backward(torch.ones(()))
    return forward.reads, backward.reads


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_reads_once_in_a_call_and_never_in_backward(ranks):
    once = ["tolist"] if ranks > 1 else []
    assert run_ranks(_reads, ranks) == [(once, [])] * ranks
