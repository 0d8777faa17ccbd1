"""Checks look at every axis, output and write, or say that they did not."""

import re

import pytest
import torch
import torch.nn.functional as F
from refusals import models
from refusals.rows import batch
from torch import nn

from scaletorch.compose import (
    check_replicas,
    count_routing,
    move_biases,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import get_rank
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import PipelineParallel
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear

DP, TP, CP, PP = ({f"{axis}_size": 2} for axis in ("dp", "tp", "cp", "pp"))


class HiddenWrites(models.AverageLayer):
    """Writes to a buffer past its version."""

    def forward(self, x):
        self.mean.data.lerp_(x.detach().mean((0, 1)), 0.1)
        return models.Layer.forward(self, x - self.mean)


class Writes(models.Plain):
    layer = HiddenWrites


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


class Sharded(models.Plain):
    """Has a layer that knows tp, and a norm that rank 1 has drawn otherwise."""

    def __init__(self, depth):
        super().__init__(depth)
        self.up = ColumnParallelLinear(4, 4)
        nn.init.constant_(self.norm.weight, 1.0 + (get_rank() == 1))


class Beside(models.Plain):
    """Mixes positions in a second output alone."""

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return {"logits": self.top(x), "states": x.cumsum(1)}


class Pooled(models.Plain):
    def forward(self, input_ids):
        return self.top(self.embed_tokens(input_ids)).mean(1)[:, :2]


class Needs(models.Offset):
    """Needs more than tokens, and counts from 2."""

    def forward(self, input_ids, weights, position_ids=None):
        return super().forward(input_ids, position_ids) * weights[..., None]


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return F.relu(super().forward(x))


class ActivatedNorm(models.Norm):
    def __init__(self, depth):
        super().__init__(depth)
        self.layers[0].batch_norm = Activated(models.HIDDEN)


class BareNorm(models.Norm):
    def __init__(self, depth):
        super().__init__(depth)
        for layer in self.layers:
            layer.batch_norm = nn.BatchNorm1d(models.HIDDEN, track_running_stats=False)


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


class LastConv(models.Plain):
    """Mixes positions in its last layer alone."""

    def __init__(self, depth):
        super().__init__(depth)
        self.layers[-1] = models.ConvLayer()


def in_blocks(size):
    """Return a model that mixes within blocks of so many positions, the last one padded."""

    def mix(x):
        blocks = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
        return x + blocks.mean(2).repeat_interleave(size, 1)[:, : x.shape[1]]

    return models.mixing(mix)


class Routed(models.Plain):
    """A block that calls its experts' forward, and not them."""

    def __init__(self, depth):
        super().__init__(depth)
        self.gate, self.experts = nn.Module(), nn.Identity()
        self.gate.register_buffer("bias", torch.zeros(4))


def one_token(_):
    return {name: torch.ones_like(x) for name, x in batch(0).items()}


def two_positions(_):
    return {name: x[:, :2] for name, x in batch(0).items()}


def weighed(_):
    return {**batch(0), "weights": torch.ones(8, 16)}


def of_length(length):
    def repeated(_):
        return {name: x.repeat(1, 3)[:, :length] for name, x in batch(0).items()}

    return {"batch": repeated}


def positioned(_):
    return {**batch(0), "position_ids": torch.arange(16).expand(8, 16)}


def own_loss(output, micro_batch):
    given = [*output.values()] if isinstance(output, dict) else [output]
    return sum(x.square().sum() for x in given), micro_batch["labels"].numel()


def put_together(model, manager, **_):
    return DataParallelBucket(
        PipelineParallel(model, group=manager.pp_group), group=manager.cp_dp_group
    )


def compiled(model, manager, **options):
    for layer in model.layers:
        layer.compile(backend="eager")
    return parallelize(model, manager, **options)


def freeze_on_one(model, batches):
    if get_rank() == 1:
        next(model.parameters()).requires_grad_(False)


def nothing(model, batches):
    pass


FOUND = "computes something else on .* than in one process: .* is off by"
SHORT = {"batch": two_positions, "options": {"cp_layout": "contiguous"}}
TWO, RECOMPUTED = {"micro_batches": 2}, {"options": {"recompute": True}}
FINE = {"dtype": torch.float64}
# What trains, on which grid -> what is said. Options: a batch and its micro-batches, a loss, how it
# is put on the grid, and what is done before the step.
CASES = {
    "writes to .data": (
        Writes,
        DP,
        {},
        r"forward changes buffer .*layers\.\d\.mean by what it sees",
    ),
    "a write on rank 1": (WritesOnOne, DP, {}, "forward changes buffer .*seen by what it sees"),
    "over tp": (models.Largest, TP, {}, "largest by what it sees, and ranks of other shards of fe"),
    "frozen over tp": (FrozenOnOne, TP, {}, r"norm.weight .* frozen has values"),
    "frozen over pp": (FrozenOnOne, PP, {}, r"norm.weight .* frozen has values"),
    "frozen later": (models.Plain, DP, {"before": freeze_on_one}, "of the parameters of this rank"),
    "beside sharded layers": (Sharded, TP, {}, r"norm.weight .* has values"),
    "one token": (models.Conv, CP, {"batch": one_token}, FOUND),
    "second output": (Beside, CP, {"loss": own_loss}, FOUND),
    "no positions": (Pooled, CP, {"loss": own_loss}, FOUND),
    "compiled": (models.Conv, CP, {"put": compiled}, FOUND),
    "one position": (models.Conv, CP, SHORT, FOUND),
    "own forward": (
        ActivatedNorm,
        DP,
        {},
        r"batch_norm \(Activated\) .* without a forward of their own",
    ),
    "needs more": (Needs, CP, {"batch": weighed}, "do not begin at 0 have to be in the batch"),
    "by hand": (
        BareNorm,
        DP,
        {"put": put_together},
        "takes stat.* dp_size=2 divides its rows",
    ),
    "small sum": (models.mixing(lambda x: x + 1e-6 * x.cumsum(1)), CP, FINE, FOUND),
    "gate": (models.mixing(lambda x: x * x.amax(1, keepdim=True).sigmoid()), CP, {}, FOUND),
    "counts": (models.Counts, CP, {}, "cp divides positions: .* the forward's argument position_i"),
    "rows": (
        models.Norm,
        DP,
        TWO,
        r"batch_norm .* takes statistics .* 2 micro-batches would each have",
    ),
    "rows over cp": (models.Norm, CP, {}, r"batch_norm \(BatchNorm1d\) .* cp_size=2 divides"),
    "rows again": (models.Norm, DP, RECOMPUTED, "batch_norm .* recompute=True would count"),
    "no such argument": (models.Plain, DP, {"batch": positioned}, "Plain takes no arg"),
    "blocks of 3": (in_blocks(3), CP, of_length(40), FOUND),
    "blocks of 5": (in_blocks(5), CP, of_length(22), FOUND),
    "blocks of 9": (in_blocks(9), CP, of_length(40), FOUND),
}
RIGHT = {
    "any name": (AnyName, DP, TWO),
    "any name over cp": (AnyName, CP, {}),
    "a buffer made anew": (Cache, DP, TWO),
    "a buffer over cp": (Cache, CP, TWO),
    "each share is another's, turned": (models.mixing(lambda x: x + x.flip(1), "before"), CP, {}),
    "blocks of 2": (in_blocks(2), CP, {}),
    "blocks of 3 that fit": (in_blocks(3), CP, of_length(12)),
}


def said(make, sizes, options):
    """Return what a step says, or None."""
    manager = setup_process_group_manager(**sizes)
    loss = options.get("loss")
    own = {} if loss is None else {"loss_fn": loss, "count_fn": lambda b: b["labels"].numel()}
    try:
        torch.manual_seed(0)
        net = make(2).to(options.get("dtype", torch.float32))
        plan = {"plan": models.PLAN} if manager.tp_size > 1 else {}
        plan |= options.get("options", {})
        model = options.get("put", parallelize)(net, manager, **plan)
        whole, number = options.get("batch", batch)(0), options.get("micro_batches", 1)
        batches = shard_global_batch(whole, number, manager, model=model)
        options.get("before", nothing)(model, batches)
        train_step(model, batches, manager, **own)
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()


def refused(names):
    return {name: said(*CASES[name][:3]) for name in names}


def right():
    return {name: said(*case) for name, case in RIGHT.items()}


def test_what_no_layout_changes_is_no_alarm():
    assert run_ranks(right, 2, timeout=200) == [dict.fromkeys(RIGHT)] * 2


def in_one_stage():
    return [said(LastConv, axis | CP, TWO) for axis in (PP, DP)]


def test_a_stage_that_mixes_is_refused_on_all_stages_and_rows():
    for told in run_ranks(in_one_stage, 4, timeout=200):
        for text in told:
            assert re.search("output of layers.1 is off by .*cp divides pos", text), text


def test_statistics_of_micro_batches_are_refused_in_one_process():
    assert said(models.Norm, {}, {}) is None
    assert "2 micro-batches would each have their own" in said(models.Norm, {}, TWO)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_was_not_looked_at_is_refused_on_every_rank():
    for rank, found in enumerate(run_ranks(refused, 2, [*CASES], timeout=250)):
        for name, text in found.items():
            assert text is not None, (rank, name)
            assert re.search(CASES[name][3], text, re.DOTALL), (rank, name, text)


def uncounted():
    model = parallelize(Routed(2), setup_process_group_manager(dp_size=2))
    counts = count_routing(model, "gate.bias")
    with pytest.warns(RuntimeWarning, match="no rank has counted a token for gate.bias"):
        move_biases(model, counts)
    destroy_process_group_manager()


def test_biases_of_experts_that_nobody_counted_stay_with_a_warning():
    run_ranks(uncounted, 2)


def buffers_apart():
    manager = setup_process_group_manager(dp_size=2)
    model = parallelize(models.FrozenNorm(2), manager)
    check_replicas(model)
    model.get_buffer("module.module.layers.1.batch_norm.running_mean").add_(get_rank())
    with pytest.raises(ScaletorchError, match=r"buffer .*layers.1.batch_norm.running_mean"):
        check_replicas(model)
    destroy_process_group_manager()


def test_buffers_that_ranks_hold_differently_are_found():
    run_ranks(buffers_apart, 2)
