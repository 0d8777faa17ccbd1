"""ZeRO 3: ranks on which `fully_shard` of torch shards a model beside tp and cp."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from scaletorch.compose import shard_global_batch, token_loss_sum
from scaletorch.parallel.context_parallel import apply_context_parallel
from scaletorch.parallel.pg_manager import ProcessGroupManager, legal_layouts
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel
from scaletorch.plan import Layout
from scaletorch.plan.holding.holdings import Holdings

from .comparing import Found, expected
from .drawing import Case
from .models import described, model_of
from .ranks import Ledger, Sends, axes_of, on_grid, storage

COMPARED = ("all_gather", "reduce_scatter")


def drawn_sharded(seed: int, ranks: int) -> Iterator[Case]:
    """Yield cases of ZeRO 3, without an end."""
    random_ = random.Random(seed)
    grids = [g for g in legal_layouts(ranks) if g.pp == 1 and g.tp <= 4 and g.cp * g.dp > 1]
    while True:
        layout = Layout(
            random_.choice(grids), zero=3, micro_rows=random_.choice((1, 2)),
            micro_batches=random_.choice((1, 2, 3)),
        )  # fmt: skip
        tied = random_.random() < 0.4
        dtype = random_.choice(("float32", "float64", "bfloat16"))
        yield Case("llama", random_.choice((2, 3, 4)), tied, dtype, 16, layout)


def sharded(cases: list[Case]) -> list[Found]:
    """Run cases on this rank among others; return what is held, counts and bytes of each."""
    return [on_grid(case, _trained) for case in cases]


def _trained(case: Case, manager: ProcessGroupManager) -> Found:
    torch.manual_seed(0)
    model = model_of(case)
    if manager.tp_size > 1:
        apply_tensor_parallel(model, group=manager.tp_group)
    apply_context_parallel(model, manager.cp_group, layout="zigzag")
    _shard(model, manager)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(case, model, optimizer, manager)
    with Ledger(axes_of(manager)) as ledger:
        _step(case, model, optimizer, manager)
    states = [x for state in optimizer.state.values() for x in state.values()]
    parts = [[*model.parameters()], [p.grad for p in model.parameters()], states]
    return [storage(map(_own, each)) for each in parts], ledger.counts, ledger.bytes


def _shard(model: torch.nn.Module, manager: ProcessGroupManager) -> None:
    mesh = DeviceMesh.from_group(manager.cp_dp_group, "cpu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(case: Case, model, optimizer, manager: ProcessGroupManager) -> None:
    layout = case.layout
    rows = layout.micro_rows * layout.micro_batches * manager.dp_size
    tokens = torch.randint(64, (rows, case.length + 1), generator=torch.Generator().manual_seed(1))
    whole = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    optimizer.zero_grad()
    for batch in shard_global_batch(whole, layout.micro_batches, manager):
        logits = model(batch["input_ids"], batch.get("position_ids"))
        token_loss_sum(logits, batch["labels"]).backward()
    optimizer.step()


def unlike(case: Case, ranks: list[Found]) -> Iterator[str]:
    """Yield what ranks have found otherwise than planned: shards, and what is sent for them."""
    holdings = Holdings(described(case))
    for rank, (held, *found) in enumerate(ranks):
        state, *planned = expected(case, holdings, rank)
        if held != state:
            yield f"{case}: rank {rank} holds {held}, planned {state}"
        for what, own, other in zip(("calls", "bytes"), planned, found, strict=True):
            if _shards(own) != _shards(other):
                yield f"{case}: rank {rank} {_shards(other)} {what}, planned {_shards(own)}"


def _shards(sent: Sends) -> Sends:
    """Return what is sent over cp x dp, or an axis with the same ranks, for shards."""
    return Counter({k: n for k, n in sent.items() if k[1] in COMPARED})
