"""Partial gradients over tp: over steps, in loops of one's own, compiled, under FSDP2."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from refusals import models
from sweeps import today
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from training import grid, tokens

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

SHARED = {"sequence_parallel": True}


class ScaledMLP(models.MLP):
    """Has a scale of many elements, which no plan names, and a gain that `late` turns on."""

    late = False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 0.9, 300))
        self.gain = nn.Parameter(torch.tensor([0.9]))

    def inner(self, x):
        x = super().inner(x) * self.scale.square().mean()
        return x * self.gain if self.late else x


class Net(models.Plain):
    """With a temperature behind the head, and a gain that `late` turns on."""

    layer = models.layer_of(models.NormedAttention, ScaledMLP)

    def __init__(self, depth):
        super().__init__(depth)
        self.temperature, self.gain = (nn.Parameter(torch.tensor([0.9])) for _ in range(2))
        self.late = False

    def turn_on(self, inside):
        """Use the gains of the layers' MLPs, or the gain before the head."""
        for module in [layer.mlp for layer in self.layers] if inside else [self]:
            module.late = True

    def top(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x * self.gain if self.late else x) * self.temperature


def made(depth=2):
    torch.manual_seed(0)
    return Net(depth).double()


class Again(torch.autograd.Function):
    """A checkpoint of one's own: it runs a layer again, and backward, in its own backward."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(gradient)
        return x.grad, None


class LayerRunAgain(Net.layer):
    def __call__(self, x):
        return Again.apply(x, super().__call__)


class Checkpointed(Net.layer):
    """A reentrant checkpoint."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=True)


LATE = {"late": False, "late in a checkpoint": True}  # and whether inside of layers

batch = partial(tokens, rows=8, words=models.VOCAB)


def loss_of(model, number, rows=slice(None)):
    whole = batch(number)
    logits = model(whole["input_ids"][rows])
    total = F.cross_entropy(logits.flatten(0, 1), whole["labels"][rows].flatten(), reduction="sum")
    return total / whole["labels"].numel()


def expected(steps, how=""):
    """Return the gradients of one process after backward passes that add up."""
    model = made()
    for number in range(steps):
        if number and how in LATE:
            model.turn_on(LATE[how])
        loss_of(model, number).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def far(found, wanted):
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    every = torch.cat([g.flatten() for g in wanted.values()])
    return max(relative_error(found[n], g, scale=every) for n, g in wanted.items())


# Axes, options of parallelize, micro-batches, stage of ZeRO.
LAYOUTS = [
    ({"tp_size": 2, "dp_size": 2}, {}, 2, 0),
    ({"tp_size": 2, "dp_size": 2}, SHARED, 1, 1),
    ({"tp_size": 2, "dp_size": 2}, SHARED, 2, 2),
    ({"tp_size": 2, "cp_size": 2}, SHARED, 1, 0),
    ({"tp_size": 2, "pp_size": 2}, SHARED, 2, 0),
    ({"tp_size": 2, "pp_size": 2}, {"schedule": "zb_h1"}, 2, 0),
    ({"tp_size": 4}, {"recompute": True, **SHARED}, 1, 0),
]


def steps_add_up(how, layouts):
    """Train two steps whose gradients add up, the later one in another way."""
    warnings.simplefilter("ignore")  # what the compiler says of graph breaks
    for sizes, options, micro_batches, zero in layouts:
        if how in LATE and "pp_size" in sizes:
            continue  # the stage before would have to know
        with grid(sizes) as manager:
            net = made()
            for layer in net.layers:
                if how == "compiled":
                    layer.compile(backend="eager")
                if how == "late in a checkpoint":
                    layer.__class__ = Checkpointed
            model = parallelize(net, manager, plan=models.PLAN, **options, rehearse=False)
            if zero:
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                shard_optimizer(optimizer, model, stage=zero)
            for number in range(2):
                if number and how in LATE:
                    net.turn_on(LATE[how])
                made_of = shard_global_batch(batch(number), micro_batches, model=model)
                if how == "no_sync" and number == 0:
                    with model.no_sync():
                        train_step(model, made_of)
                else:
                    train_step(model, made_of)
            error = far(full_gradients(model), expected(2, how))
            assert error < 1e-11, (how, sizes, options, zero, error)


@pytest.mark.parametrize("how", ["as usual", *today(["no_sync", *LATE, "compiled"], 5)])
def test_steps_that_add_up_on_four_ranks(how):
    layouts = {"as usual": today(LAYOUTS, 3), "compiled": LAYOUTS[2:5:2]}
    run_ranks(steps_add_up, 4, how, layouts.get(how, LAYOUTS[::2]), timeout=200)


def uneven():
    """Three tp ranks have other shards, and so other ranges of what all of them have."""
    with grid({"tp_size": 3, "dp_size": 2}) as manager:
        plan = {n: s for n, s in models.PLAN.items() if "mlp" in n or n == "lm_head"}
        ranges = set()
        for bucket_size in (800, 2**24):
            model = parallelize(made(), manager, plan=plan, bucket_size=bucket_size, rehearse=False)
            shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), model, stage=1)
            train_step(model, shard_global_batch(batch(0), 1, model=model))
            assert far(full_gradients(model), expected(1)) < 1e-11, bucket_size
            shards = parameter_shards(model)
            ranges |= {(bucket_size, s.name, s.start, s.stop) for s in shards if "scale" in s.name}
        return manager.dp_rank, ranges


def test_ranges_that_differ_between_tp_ranks():
    found = run_ranks(uneven, 6, timeout=200)
    assert len({frozenset(ranges) for place, ranges in found if place == 0}) > 1


def whole_of(model):
    """Return the gradients of parameters that every tp rank has whole."""
    names = ("norm", "scale", "temperature")
    return {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None and any(part in name for part in names)
    }


@distributed_test(4, timeout=200)
def test_loops_of_ones_own():
    """A backward of one's own sums by itself: thawed parameters and parts divided before, too."""
    with grid({"tp_size": 2, "dp_size": 2}) as manager:
        wanted = {n: g for n, g in expected(1).items() if n in whole_of_names()}
        for options in ({}, SHARED):
            model = apply_tensor_parallel(made(), models.PLAN, manager.tp_group, **options)
            model.layers[0].mlp.scale.requires_grad_(False)
            model.layers[1].self_attn.norm.requires_grad_(False)
            loss_of(model, 1).backward()
            model.zero_grad()
            model.layers[0].mlp.scale.requires_grad_(True)
            model.layers[1].self_attn.norm.requires_grad_(True)
            loss_of(model, 0).backward()
            assert far(whole_of(model), wanted) < 1e-11, options
        model = made()
        inner = {n.removeprefix("layers.*."): s for n, s in models.PLAN.items() if "mlp" in n}
        apply_tensor_parallel(model.layers[0], inner, manager.tp_group)
        rest = {n: s for n, s in models.PLAN.items() if "mlp" not in n}
        rest |= {f"layers.1.{name}": style for name, style in inner.items()}
        apply_tensor_parallel(model, rest, manager.tp_group)
        loss_of(model, 0).backward()
        assert far(whole_of(model), wanted) < 1e-11, "a part was divided before"


def whole_of_names():
    model = made()
    loss_of(model, 0).backward()
    return whole_of(model)


@distributed_test(4, timeout=200)
def test_fully_sharded_parameters():
    with grid({"tp_size": 2, "dp_size": 2}) as manager:
        wanted = {n: g for n, g in expected(2).items() if n in whole_of_names()}
        for options in ({}, SHARED):
            model = apply_tensor_parallel(made(), models.PLAN, manager.tp_group, **options)
            mesh = DeviceMesh.from_group(manager.dp_group, "cpu")
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            rows = slice(manager.dp_rank * 4, manager.dp_rank * 4 + 4)
            for number in range(2):
                loss_of(model, number, rows).backward()
            assert far(whole_of(model), wanted) < 1e-11, options


def first_checkpointed_later(layouts):
    for sizes, options, *_ in layouts:
        with grid(sizes) as manager:
            net = made()
            model = parallelize(net, manager, plan=models.PLAN, **options, rehearse=False)
            train_step(model, shard_global_batch(batch(0), 1, model=model))
            net.turn_on(True)
            for layer in net.layers:
                layer.__class__ = type("Later", (Checkpointed, type(layer)), {})
            with pytest.raises(InvalidArgumentError, match=r"gain.* comes .*a reentrant check"):
                train_step(model, shard_global_batch(batch(1), 1, model=model))


def test_a_parameter_used_later_in_a_later_checkpoint_is_refused():
    run_ranks(first_checkpointed_later, 4, LAYOUTS[:4], timeout=200)


class Hidden(torch.autograd.Function):
    """Keeps the group of tensor parallelism, and might communicate."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def refused(sizes, options, micro_batches, runs_again, words):
    with grid(sizes) as manager:
        net = made()
        for layer in net.layers if runs_again else ():
            layer.__class__ = LayerRunAgain
        if not runs_again:
            net.layers[0].register_forward_hook(lambda _m, _i, x: Hidden.apply(x, manager.tp_group))
        model = parallelize(net, manager, plan=models.PLAN, **options, rehearse=False)
        with pytest.raises(InvalidArgumentError, match=words):
            train_step(model, shard_global_batch(batch(0), micro_batches, model=model))


@distributed_test(4, timeout=200)
def test_functions_that_run_layers_again_or_may_communicate_are_refused():
    for sizes, options, micro_batches, _ in LAYOUTS[::2]:
        words = r"not show.*layers\.\d\.self_attn\..*\.Again"
        refused(sizes, options, micro_batches, True, words)
    refused(*LAYOUTS[0][:3], False, "Hidden, which holds the process group of tens")


class GatedBlock(nn.Module):
    """Scales features between two layers by the output of a row-parallel layer before both."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Linear(16, 16, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        heads = x[:, None]
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        gate = self.first(x)
        return x + self.down(self.up(gate) * gate.mean(-1, keepdim=True))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def a_gate_is_refused(sizes, compiles):
    model = Gated().double()
    for block in model.blocks if compiles else ():
        block.compile(backend="aot_eager")
    rows = {"blocks.*.first": "row_split", "blocks.*.up": "column", "blocks.*.down": "row"}
    with grid(sizes) as manager:
        model = parallelize(model, manager, plan=rows, rehearse=False)
        batch = shard_global_batch(tokens(), 2, manager)
        # Ranks of another pipeline stage get a RuntimeError with the sentence.
        with pytest.raises((InvalidArgumentError, RuntimeError), match="uses the summed or gath"):
            train_step(model, batch)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("other", [{}, *({f"{axis}_size": 2} for axis in ("dp", "cp", "pp"))])
def test_an_output_used_inside_a_region_is_refused_on_every_layout(other, compiles):
    run_ranks(a_gate_is_refused, 4, {"tp_size": 2 if other else 4, **other}, compiles)
