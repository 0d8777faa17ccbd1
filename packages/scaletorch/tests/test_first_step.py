"""What ranks hold differently is told on all of them, before or in the first step."""

import re

import pytest
import torch

from scaletorch.compose import parallelize, seed_ranks, shard_global_batch, train_step
from scaletorch.dist import get_rank
from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.context_parallel import choose_method
from scaletorch.parallel.pg_manager import (
    Grid,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pg_manager.layouts import legal_layouts


def global_batch(rows=4, length=16):
    tokens = torch.randint(64, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def llama(**sizes):
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES | HEADS | sizes))


def seeds_differ(manager):
    torch.manual_seed(get_rank())
    return Llama(LlamaConfig(vocab_size=64, hidden_size=32, num_layers=2)), global_batch(), {}, {}


def broadcast_over_dp_alone(manager):
    model = llama()
    if get_rank() == 0:
        torch.nn.init.ones_(model.layers[1].mlp.up_proj.weight)
    return model, global_batch(), {"data_parallel": {"init_sync": "broadcast"}}, {}


def other_labels_by_hand(manager):
    """Micro-batches of the caller's own: ranks of other rows may hold others."""
    batch = global_batch()
    if get_rank() == 1:
        batch["labels"] = batch["labels"].flip(0)
    return llama(), [batch], {}, {}


def other_arguments(manager):
    return llama(), global_batch(), {"recompute": get_rank() == 1}, {}


class OfItsWidth(torch.nn.Module):
    """Works on the width that it was built with, as models of transformers do."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x):
        up = self.up_proj(x).view(*x.shape[:2], 6, 8)
        return self.down_proj(self.gate_proj(x).sigmoid() * up.flatten(2))


def sizes_of_its_own(manager):
    model = llama()
    model.layers[1].mlp = OfItsWidth(model.layers[1].mlp)
    return model, global_batch(), {}, {}


def uneven_heads(manager):
    """One tp rank has two heads, which two cp ranks can share out, and the other has one."""
    model = llama(hidden_size=24, num_heads=3, num_kv_heads=1)
    return model, global_batch(), {"cp_method": "ulysses"}, {}


def run(make, sizes):
    """Return what a first step says."""
    manager = setup_process_group_manager(**sizes)
    try:
        model, batch, options, cut = make(manager)
        model = parallelize(model, manager, **options, rehearse=isinstance(batch, dict))
        if isinstance(batch, dict):
            batch = shard_global_batch(batch, 1, manager, **cut)
        return train_step(model, batch).item()
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()


TP, PP, CP, DP = ({f"{axis}_size": 2} for axis in ("tp", "pp", "cp", "dp"))
VALUES = r"disagree on the values of the plain model .*\nrank 1 \(\+\).*"
UP = VALUES + r"layers.1.mlp.up_proj.weight \(48, 32\) torch.float32 has values"
BATCH = r"labels on rank 1 \(.*\) is not that of rank 0"
CASES = {
    (seeds_differ, "tp"): VALUES + "embed_tokens.weight",
    (seeds_differ, "pp"): VALUES + "embed_tokens.weight",
    (seeds_differ, "cp"): "disagree on the values to begin with",
    (broadcast_over_dp_alone, "tp"): UP,
    (other_labels_by_hand, "tp"): BATCH,
    (other_labels_by_hand, "pp"): BATCH,
    (sizes_of_its_own, "tp"): (
        r"module 'layers.1.mlp' \(\w+\) failed in its first step on this layout with RuntimeError "
        r".*shape '\[\d, 16, 6, 8\]' is invalid.* tp leaves each rank its share"
    ),
    (other_arguments, "dp"): r"arguments given to parallelize.*\+ recompute=True",
}


def run_cases():
    return [run(make, {f"{axis}_size": 2}) for make, axis in CASES]


def test_ranks_that_differ_are_told_on_every_rank():
    for rank, found in enumerate(run_ranks(run_cases, 2, timeout=200)):
        for (case, match), said in zip(CASES.items(), found, strict=True):
            assert re.search(match, str(said), re.DOTALL), (rank, case, said)


def test_rows_of_the_callers_own_may_differ_over_dp():
    assert all(isinstance(loss, float) for loss in run_ranks(run, 2, other_labels_by_hand, DP))


def test_heads_that_one_tp_rank_cannot_share_out_go_round_a_ring_there():
    losses = run_ranks(run, 4, uneven_heads, TP | CP, timeout=200)
    assert all(isinstance(loss, float) for loss in losses), losses


class OfAllExperts(torch.nn.Module):
    """Experts that keep their number under a name that says nothing of experts."""

    def __init__(self):
        super().__init__()
        self.total, self.weight = 4, torch.nn.Parameter(torch.ones(4, 32, 32))

    def forward(self, hidden, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.total):
            token, slot = torch.where(top_k_index == expert)
            states = hidden[token] @ self.weight[expert] * top_k_weights[token, slot, None]
            result = result.index_add(0, token, states)
        return result


class ToOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = OfAllExperts()

    def forward(self, x):
        rows = x.flatten(0, 1)
        index = rows.new_ones((len(rows), 1), dtype=torch.int64)
        return self.experts(rows, index, rows.new_ones((len(rows), 1))).view_as(x)


def all_experts_on_each_rank(manager):
    model = llama()
    model.layers[1].mlp = ToOne()
    return model, global_batch(), {"plan": {"layers.1.mlp.experts": "experts"}}, {}


def test_experts_that_want_all_of_them_are_told_how_to_say_their_number():
    """Every token goes to rank 0, whose experts fail; rank 1 computes nothing and hears of it."""
    assert isinstance(run(all_experts_on_each_rank, {}), float)
    said = run_ranks(run, 2, all_experts_on_each_rank, {**DP, "ep_size": 2})
    assert re.search(
        r"module 'layers.1.mlp.experts' \(OfAllExperts\) failed in its first step on this layout "
        r"with IndexError .* let them keep their number in an attribute such as num_experts",
        said[0],
    ), said
    assert "rank 0 cannot take part in the experts 'layers.1.mlp.experts': IndexError" in said[1]


BAD = [
    (lambda m: shard_global_batch(global_batch(), 0, m), "num_micro_batches must be a whole .* 0"),
    (lambda m: shard_global_batch(global_batch(), -1, m), "at least 1; it is -1"),
    (lambda m: shard_global_batch(global_batch(), "2", m), "it is '2'"),
    (lambda m: shard_global_batch(global_batch(rows=0), 1, m), "batch of 0 rows"),
    (
        lambda m: shard_global_batch({}, 1, m),
        r"dim 0 is rows, such as input_ids \[B, L\]; .* has nothing",
    ),
    (lambda m: parallelize(llama(), Grid()), "manager must be a ProcessGroupManager.* Grid"),
    (lambda m: parallelize(3, m), "takes a plain nn.Module, got int"),
    (lambda m: parallelize(parallelize(llama(), m), m), "plain nn.Module, got DataParallelBucket"),
    (lambda m: seed_ranks("a", m), "seed must be a whole number; it is 'a'"),
    (lambda m: LlamaConfig(hidden_size="128"), "hidden_size must be a whole number.* '128'"),
    (lambda m: LlamaConfig(num_layers=0), "num_layers must be .*: 0"),
    (lambda m: choose_method(torch.ones(2), torch.ones(2), 2), r"must be \[B, heads, L, D\]"),
    (lambda m: choose_method(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0), "at least 1"),
    (lambda m: legal_layouts(-4), "world_size must be a positive int, got -4"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[1])
def test_bad_arguments_are_named(case):
    manager = setup_process_group_manager()
    try:
        with pytest.raises(InvalidArgumentError, match=case[1]):
            case[0](manager)
    finally:
        destroy_process_group_manager()
