"""The ranks over which gradients are summed: of a group, an axis, and others for experts."""

import copy
from functools import partial

import pytest
import torch
from in_turn import for_each, in_turn
from torch import distributed, nn

from scaletorch.dist import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    DataParallelNaive,
    clip_grad_norm_,
    global_grad_norm,
    shard_optimizer,
    whole_gradients,
)
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

RANKS, EXPERTS = 4, 2  # rank r has expert r % 2, and expert e is on ranks e and e + 2
STEPS = 3


class Part(nn.Module):
    """One rank's model: the shared layers and its own experts."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(5)
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 2)
        every = [nn.Linear(6, 6) for _ in range(EXPERTS)]
        self.expert = every[experts[0]] if len(experts) == 1 else nn.ModuleList(every)
        self.double()

    def forward(self, x, expert=None, idle=False):
        hidden = self.before(x)
        if not idle:
            hidden = (self.expert if expert is None else self.expert[expert])(hidden)
        return self.after(hidden).square().sum() / 7


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def idle(rank, step):
    """Rank 1 gives its expert nothing in step 1; in step 2 nobody has expert 0."""
    return (rank, step) == (1, 1) or (rank % EXPERTS == 0 and step == 2)


def reference():
    """Norms, gradients of each step and weights at the end, of one process with all experts."""
    model = Part(range(EXPERTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(RANKS):
            model(batch(rank, step), rank % EXPERTS, idle(rank, step)).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms, gradients, dict(model.named_parameters())


def own(name, rank):
    """The name that a rank's parameter has where one process has all experts."""
    return name.replace("expert.", f"expert.{rank % EXPERTS}.")


def groups_of(model):
    rank = distributed.get_rank()
    made = [distributed.new_group([e, e + 2]) for e in range(EXPERTS)]
    names = (name for name, _ in model.named_parameters() if name.startswith("expert"))
    return dict.fromkeys(names, made[rank % EXPERTS])


def train(stage, bucket_size, parts):
    rank = distributed.get_rank()
    norms, gradients, weights = reference()
    plain = Part([rank % EXPERTS])
    model = DataParallelBucket(
        plain, bucket_size=bucket_size, group=distributed.group.WORLD, groups=groups_of(plain)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        rows = batch(rank, step).chunk(parts)
        for number, some in enumerate(rows):
            model.require_backward_grad_sync = number == parts - 1
            model(some, idle=idle(rank, step)).backward()
        for name, gradient in whole_gradients(model).items():
            assert relative_error(gradient, gradients[step][own(name, rank)]) < 1e-13, (name, step)
        norm = global_grad_norm(model, distributed.group.WORLD)
        assert relative_error(norm, norms[step]) < 1e-13
        clip_grad_norm_(model, 0.5, distributed.group.WORLD)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter, weights[own(name, rank)]) < 1e-12, name


def test_each_parameter_is_summed_over_its_own_group():
    buckets_and_parts = ((8, 1), (2**24, 1), (20, 3))
    run_ranks(
        in_turn,
        RANKS,
        for_each(train, ((stage, *each) for stage in (0, 1, 2) for each in buckets_and_parts)),
    )


def refused():
    world = distributed.group.WORLD
    plain = Part([distributed.get_rank() % EXPERTS])
    groups = groups_of(plain)
    with pytest.raises(InvalidArgumentError, match=r"groups contains expert\.x"):
        DataParallelBucket(plain, group=world, groups={"expert.x": world})
    with pytest.raises(InvalidArgumentError, match="op='mean' would divide"):
        DataParallelBucket(plain, group=world, groups=groups, op="mean")
    with pytest.raises(MismatchError, match=r"values to begin with[^$]*expert.weight has values"):
        DataParallelBucket(plain, group=world)
    model = DataParallelBucket(plain, group=world, groups=groups)
    pair = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    with pytest.raises(InvalidArgumentError, match="ranks that are not in the group of the norm"):
        global_grad_norm(model, pair)


def test_what_cannot_be_summed_so_is_refused():
    run_ranks(refused, RANKS)


def check_axis():
    """Without a group: over context and data ranks, and never over tensor ranks."""
    rank = distributed.get_rank()
    for layout in ({"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "cp_size": 2}):
        setup_process_group_manager(**layout)
        try:
            model = DataParallelBucket(nn.Linear(2, 1, bias=False))
            model(torch.full((1, 2), 10.0**rank)).sum().backward()
            total = 10.0**rank + 10.0 ** ((rank + 2) % 4)
            assert model.weight.grad.tolist() == [[total, total]]
            del model
        finally:
            destroy_process_group_manager()
    with pytest.raises(StateError, match="no process group for the cp_dp axis"):
        DataParallelBucket(nn.Linear(2, 1))


def test_reduces_over_its_group_only_by_default_the_cp_dp_axis_of_the_manager():
    run_ranks(check_axis, 4)


def check_ddp():
    """A mean is what torch's DistributedDataParallel does with equal shares."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    kinds = [nn.parallel.DistributedDataParallel]
    for kind in (DataParallelBucket, DataParallelNaive):
        kinds.append(partial(kind, group=distributed.group.WORLD, op="mean"))
    rows, found = torch.randn(4, 4, dtype=torch.float64)[distributed.get_rank() :: 2], []
    for kind in kinds:
        model = kind(copy.deepcopy(net))
        for _ in range(2):
            with model.no_sync():
                model(rows).square().mean().backward()
            model(rows + 1).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
        del model  # torch's can deadlock if it is alive when the group is destroyed
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=1e-12, atol=1e-14)


def check_channels_last():
    """A fused optimizer wants gradients with its parameters' strides."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = DataParallelBucket(net, group=distributed.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    assert net.weight.grad.stride() == net.weight.stride()


def test_means_are_those_of_torch_and_gradients_have_the_parameters_strides():
    run_ranks(in_turn, 2, [check_ddp, check_channels_last])
