"""The ways to shard a block's experts over the ranks: by hand, ours, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from scaletorch.parallel.expert_parallel import apply_expert_parallel

from .block import Block
from .by_hand import around_own_code, by_hand


def ours(block: Block) -> nn.Module:
    """Shard the experts by our plan."""
    return apply_expert_parallel(block, {"experts": "experts"}, dist.group.WORLD)


def theirs(block: Block) -> nn.Module:
    """Shard the experts as the plans of transformers do (`ep_dispatch_experts`)."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    experts: Any = block.experts
    experts.num_experts //= ranks
    own = slice(dist.get_rank() * experts.num_experts, (dist.get_rank() + 1) * experts.num_experts)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach()[own].clone()))
    experts.forward = AllToAllEP(experts, mesh["ep"], mesh["tp"])
    return block


WAYS: dict[str, Callable[[Block], nn.Module]] = {
    "by hand": by_hand,
    "by hand, experts' own code": around_own_code,
    "scaletorch": ours,
    "transformers": theirs,
}
