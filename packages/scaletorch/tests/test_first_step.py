"""What is refused before or in a step, on every rank; `refusals` has the models of the guide."""

import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from refusals import models
from refusals.rows import batch
from tiny_transformers import tiny
from torch import nn
from training import grid, llama, tokens

from scaletorch.compose import (
    check_replicas,
    count_routing,
    move_biases,
    parallelize,
    seed_ranks,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import get_rank
from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import (
    Grid,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import PipelineParallel
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear

ONE = {}
DP, TP, CP, PP = ({f"{axis}_size": 2} for axis in ("dp", "tp", "cp", "pp"))
VALUES = r"disagree on the values of the plain model .*\nrank 1 \(\+\).*"
WITHOUT_ATTENTION = {name: style for name, style in models.PLAN.items() if "attn" not in name}
FOUND = "computes something else on .* than in one process: .* is off by"


class WritesOnOne(models.Plain):
    """Changes a buffer for rows that rank 1 alone has."""

    def __init__(self, depth):
        super().__init__(depth)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids):
        if (input_ids[0] == batch(0)["input_ids"][4]).all():
            self.seen += 1
        return super().forward(input_ids)


class FrozenOnOne(models.Plain):
    def __init__(self, depth):
        super().__init__(depth)
        self.norm.weight.requires_grad_(get_rank() != 1)


class OnesOnOne(models.Plain):
    def __init__(self, depth):
        super().__init__(depth)
        nn.init.constant_(self.norm.weight, 1.0 + (get_rank() == 1))


class Sharded(OnesOnOne):
    """Has a layer that knows tp beside the norm that rank 1 has drawn otherwise."""

    def __init__(self, depth):
        super().__init__(depth)
        self.up = ColumnParallelLinear(4, 4)


class Beside(models.Plain):
    """Mixes positions in a second output alone."""

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return {"logits": self.top(x), "states": x.cumsum(1)}


class Pooled(models.Plain):
    def forward(self, input_ids):
        return self.top(self.embed_tokens(input_ids)).mean(1)[:, :2]


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return F.relu(super().forward(x))


def normed(depth, kind=nn.BatchNorm1d, **options):
    model = models.Norm(depth)
    for layer in model.layers:
        layer.batch_norm = kind(models.HIDDEN, **options)
    return model


class OfItsWidth(models.MLP):
    """Works on the width that it was built with, as models of transformers do."""

    def inner(self, x):
        return super().inner(x).view(*x.shape[:2], 3, 4).flatten(2)


def with_own_attention(depth):
    """The forward of attention is a function of the user's."""
    model = models.Plain(depth)
    for layer in model.layers:
        layer.self_attn.forward = lambda x, forward=layer.self_attn.forward: forward(x)
    return model


class FixedWidth(models.Plain):
    layer = models.layer_of(feed_forward=OfItsWidth)


class Frequent(models.Plain):
    """Gradients of words are divided by their number in the batch."""

    def __init__(self, depth):
        super().__init__(depth)
        self.embed_tokens.scale_grad_by_freq = True


class AnyName(models.Plain):
    def forward(self, idx):
        return self.top(self.embed_tokens(idx))


class Cache(models.Plain):
    """Makes a table anew when it is short: the same one on every rank, however often."""

    def __init__(self, depth):
        super().__init__(depth)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, input_ids):
        if len(self.table) < 40:
            self.register_buffer("table", torch.ones(40), persistent=False)
        return super().forward(input_ids) * self.table[0]


def in_blocks(size):
    """Return a model that mixes within blocks of so many positions, the last one padded."""

    def mix(x):
        blocks = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
        return x + blocks.mean(2).repeat_interleave(size, 1)[:, : x.shape[1]]

    return models.mixing(mix)


def of_length(length):
    return {name: x.repeat(1, 3)[:, :length] for name, x in batch(0).items()}


def own_loss(output, micro_batch):
    given = [*output.values()] if isinstance(output, dict) else [output]
    return sum(x.square().sum() for x in given), micro_batch["labels"].numel()


def put_together(model, manager, **_):
    stage = PipelineParallel(model, group=manager.pp_group)
    return DataParallelBucket(stage, group=manager.cp_dp_group)


def frozen_later(model, manager, **options):
    parallel = parallelize(model, manager, **options)
    if get_rank() == 1:
        next(parallel.parameters()).requires_grad_(False)
    return parallel


def cut_by_hand():
    """Return a micro-batch that `shard_global_batch` did not make, with other labels on rank 1."""
    found = batch(0)
    if get_rank() == 1:
        found["labels"] = found["labels"].flip(0)
    return [found]


def said(make, sizes, *, whole=None, count=1, cut=None, loss=None, put=parallelize, **options):
    """Return what a first step says of a model, or None."""
    manager = setup_process_group_manager(**sizes)
    own = {} if loss is None else {"loss_fn": loss, "count_fn": lambda b: b["labels"].numel()}
    try:
        torch.manual_seed(0)
        plan = {"plan": models.PLAN} if manager.tp_size > 1 else {}
        model = put(make(2).double(), manager, **{**plan, **options})
        micro_batches = (
            cut() if cut else shard_global_batch(whole or batch(0), count, manager, model=model)
        )
        train_step(model, micro_batches, manager, **own)
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()


WHOLE_WIDTH = (
    r"module 'layers.\d.mlp' \(\w+\) failed in its first step on this layout with RuntimeError "
    r".*shape '\[\d, 16, 3, 4\]' is invalid.* tp leaves each rank its share"
)
REPLACED = r"self_attn' \(Attention\) cannot be sequence parallel: its forward was replaced"
UNCUT = {"plan": WITHOUT_ATTENTION, "rehearse": False}
BY_HAND = {"cut": cut_by_hand, "rehearse": False}
SHORT = {"whole": {n: x[:, :2] for n, x in batch(0).items()}, "cp_layout": "contiguous"}
ONE_SYNC = {"data_parallel": {"init_sync": "broadcast"}}
CASES = {  # of two ranks: the model, the layout, what is said, and what else `said` takes
    "a write on rank 1": (WritesOnOne, DP, "changes buffer seen from its inputs"),
    "frozen over tp": (FrozenOnOne, TP, r"norm.weight .* frozen has values"),
    "frozen over pp": (FrozenOnOne, PP, r"norm.weight .* frozen has values"),
    "frozen later": (models.Plain, DP, "of the parameters of this rank", {"put": frozen_later}),
    "broadcast over dp alone": (OnesOnOne, TP, VALUES + "norm.weight", ONE_SYNC),
    "beside sharded layers": (Sharded, TP, r"norm.weight .* has values"),
    "labels by hand": (models.Plain, TP, r"labels: on rank 1 \(.*\) not as on rank 0", BY_HAND),
    "a fixed width": (FixedWidth, TP, WHOLE_WIDTH),
    "attention on shares": (with_own_attention, TP, REPLACED, UNCUT | {"sequence_parallel": True}),
    "second output": (Beside, CP, FOUND, {"loss": own_loss}),
    "no positions": (Pooled, CP, FOUND, {"loss": own_loss}),
    "one position": (models.Conv, CP, FOUND, SHORT),
    "small sum": (models.mixing(lambda x: x + 1e-6 * x.cumsum(1)), CP, FOUND),
    "blocks of 3": (in_blocks(3), CP, FOUND, {"whole": of_length(40)}),
    "norm's own forward": (
        partial(normed, kind=Activated), DP,
        r"batch_norm \(Activated\) .* without a forward of their own",
    ),
    "norm by hand": (
        partial(normed, track_running_stats=False), DP,
        "takes stat.* dp_size=2 divides its rows", {"put": put_together},
    ),
    "frequencies over dp": (Frequent, DP, FOUND),
    "frequencies over cp": (Frequent, CP, FOUND),
    "frequencies over micro-batches": (Frequent, PP, FOUND, {"count": 2}),
    # What no layout changes.
    "any name": (AnyName, DP, None, {"count": 2}),
    "any name over cp": (AnyName, CP, None),
    "a buffer made anew": (Cache, DP, None, {"count": 2}),
    "a buffer over cp": (Cache, CP, None, {"count": 2}),
    "turned shards": (models.mixing(lambda x: x + x.flip(1), "before"), CP, None),
    "blocks of 3 that fit": (in_blocks(3), CP, None, {"whole": of_length(12)}),
    "own attention on whole tokens": (with_own_attention, TP, None, UNCUT),
    "rows by hand": (models.Plain, DP, None, BY_HAND),
    "frequencies over pp": (Frequent, PP, None),
}  # fmt: skip


def outcomes():
    return {
        name: said(make, sizes, **(options[0] if options else {}))
        for name, (make, sizes, _, *options) in CASES.items()
    }


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_just_what_ranks_would_compute_otherwise_is_refused_on_every_rank():
    for rank, found in enumerate(run_ranks(outcomes, 2, timeout=250)):
        for name, (_, _, words, *_) in CASES.items():
            if words is None:
                assert found[name] is None, (rank, name)
            else:
                assert re.search(words, found[name] or "", re.DOTALL), (rank, name, found[name])


def test_micro_batches_of_one_process_are_rehearsed_too():
    assert said(Frequent, ONE) is said(models.Norm, ONE) is None
    assert re.match(f"RehearsalError.*{FOUND}", said(Frequent, ONE, count=2))
    assert "changes parameter layers.0.scale. " in said(models.Shrinking, ONE, count=2)
    assert "2 micro-batches would each have their own" in said(models.Norm, ONE, count=2)


def test_a_first_step_with_several_micro_batches_may_be_a_later_one():
    with grid() as manager:
        model = parallelize(Frequent(2).double(), manager)
        train_step(model, shard_global_batch(batch(0), 1, manager))
        model.zero_grad()
        with pytest.raises(ScaletorchError, match=FOUND):
            train_step(model, shard_global_batch(batch(1), 2, manager))


def test_a_forward_that_holds_its_module_is_not_rehearsed():
    words = (
        r"not rehearsed, .* \(the forward of layers\.0\.self_attn was replaced by a function that"
    )
    with pytest.warns(RuntimeWarning, match=words):
        assert said(with_own_attention, ONE, count=2) is None


class Patient(models.Plain):
    """Begins something after a number of its forwards."""

    def __init__(self, depth):
        super().__init__(depth)
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids) * (2.0 if self.calls > 2 else 1.0)


def warned(sizes):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert said(Patient, sizes, count=2) is None
    return any("counts in attribute" in str(each.message) for each in heard)


def test_what_counts_forwards_is_told():
    assert warned(ONE)
    for sizes in (DP, TP, PP):
        assert run_ranks(warned, 2, sizes)[0], sizes


@distributed_test(4, timeout=200)
def test_heads_that_one_tp_rank_cannot_share_use_a_ring_there():
    """One tp rank has two heads, which two cp ranks can share, and the other has one."""
    manager = setup_process_group_manager(**TP, **CP)
    plain = llama(hidden_size=24, num_heads=3, num_kv_heads=1)
    model = parallelize(plain, manager, cp_method="ulysses")
    train_step(model, shard_global_batch(tokens(length=16), 1, manager))


class AllExperts(nn.Module):
    """Experts that keep their number under a name that says nothing of experts."""

    def __init__(self):
        super().__init__()
        self.total = 4
        self.weight = nn.Parameter(torch.ones(4, models.HIDDEN, models.HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.total):
            token, slot = torch.where(top_k_index == expert)
            states = hidden[token] @ self.weight[expert] * top_k_weights[token, slot, None]
            result = result.index_add(0, token, states)
        return result


class ToOne(nn.Module):
    """Sends every token to expert 1."""

    def __init__(self):
        super().__init__()
        self.experts = AllExperts()

    def forward(self, x):
        rows = x.flatten(0, 1)
        index = rows.new_ones((len(rows), 1), dtype=torch.int64)
        return self.experts(rows, index, rows.new_ones((len(rows), 1))).view_as(x)


class OfExperts(models.Plain):
    layer = models.layer_of(feed_forward=ToOne)


def test_experts_that_loop_over_all_of_them_are_told_how_to_give_their_number():
    """Every token goes to rank 0, whose experts fail; rank 1 computes nothing and hears of it."""
    plan = {"plan": {"layers.*.mlp.experts": "experts"}}
    assert said(OfExperts, ONE, **plan) is None
    found = run_ranks(said, 2, OfExperts, {**DP, "ep_size": 2}, **plan)
    assert re.search(
        r"module 'layers.0.mlp.experts' \(AllExperts\) failed in its first step on this layout "
        r"with IndexError .* let them keep their number in an attribute such as num_experts",
        found[0],
    ), found
    assert "rank 0 cannot take part in the experts 'layers.0.mlp.experts': IndexError" in found[1]


BAD = [
    (lambda m: shard_global_batch(tokens(), "2", m), "num_micro_batches must .* at least 1; .*'2'"),
    (lambda m: shard_global_batch(tokens(rows=0), 1, m), "batch of 0 rows"),
    (lambda m: shard_global_batch({}, 1, m), r"such as input_ids \[B, L\]; .* has nothing"),
    (lambda m: parallelize(llama(), Grid()), "manager must be a ProcessGroupManager.* Grid"),
    (lambda m: parallelize(3, m), "takes a plain nn.Module, got int"),
    (lambda m: parallelize(parallelize(llama(), m), m), "plain nn.Module, got DataParallelBucket"),
    (lambda m: seed_ranks("a", m), "seed must be a whole number; it is 'a'"),
    (lambda m: shard_global_batch(tokens(), 1), "needs the grid: pass the manager, or as model"),
    (lambda m: check_replicas(nn.Linear(1, 1), "x"), "a ProcessGroupManager.*a str"),
    (lambda m: check_replicas(None), "model must be what parallelize returned, got NoneType"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[1])
def test_bad_arguments_are_named(case):
    with grid() as manager, pytest.raises(InvalidArgumentError, match=case[1]):
        case[0](manager)


def zeros_in_a_mask(micro_batch):
    micro_batch["attention_mask"][:, 0] = 0


def positions_that_restart(micro_batch):
    ids = micro_batch["position_ids"] = micro_batch["position_ids"].clone()
    ids[:, 2:] -= int(ids[0, 2])


def later(change):
    """Return the step, and what a rank hears there of a change that rank 1 alone makes."""
    manager = setup_process_group_manager(cp_size=2)
    model = parallelize(tiny("Llama"), manager, rehearse=False)
    whole = tokens(length=16) | {"position_ids": torch.arange(16).expand(4, 16)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    for step in range(3):
        micro_batches = shard_global_batch(whole, 1, manager)
        if step == 2 and get_rank() == 1:
            change(micro_batches[0])
        try:
            train_step(model, micro_batches)
            model.zero_grad()
        except ScaletorchError as error:
            return step, str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (zeros_in_a_mask, "attention_mask must hold no zeros"),
        (positions_that_restart, "position_ids are not those of this rank's zigzag shard"),
    ],
)
def test_every_rank_hears_of_a_later_mask_or_position(change, words):
    (one, first), (other, second) = run_ranks(later, 2, change, timeout=200)
    assert one == other == 2
    assert re.search(words, second)
    assert re.search(f"rank 1 cannot take part in this step.*{words}", first)


class Gated(models.Plain):
    """A block that calls its experts' forward, and not them."""

    def __init__(self, depth):
        super().__init__(depth)
        self.gate, self.experts = nn.Module(), nn.Identity()
        self.gate.register_buffer("bias", torch.zeros(4))


@distributed_test(2)
def test_biases_and_buffers_of_ranks():
    """Biases that no token moves stay, with a warning; a buffer that differs is found."""
    model = parallelize(Gated(2), setup_process_group_manager(dp_size=2))
    counts = count_routing(model, "gate.bias")
    with pytest.warns(RuntimeWarning, match="no rank has counted a token for gate.bias"):
        move_biases(model, counts)
    check_replicas(model)
    model.module.module.gate.bias.add_(get_rank())
    with pytest.raises(ScaletorchError, match=r"buffer .*gate\.bias"):
        check_replicas(model)
