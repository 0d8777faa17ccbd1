"""Selective recomputation: the same bits, nothing dear run twice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.compose import parallelize, recompute_layers, shard_global_batch, train_step
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)


class Watched(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Runs a function of hidden states and its own weight."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def gradients(function, *, select):
    """Return the output and the gradients of a layer in a list of layers."""
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(function)])
    if select:
        recompute_layers(model, recompute="selective")
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    out = model.layers[0](x)
    out.pow(2).sum().backward()
    return out.detach(), x.grad, model.layers[0].weight.grad


def in_place(x, w):
    y = F.silu(x @ w)
    z = y * 2
    y.add_(1)  # after it was read, before it is kept
    return z.sigmoid() * y.sigmoid()


def source_in_place(x, w):
    y = F.silu(x @ w)
    z = y * 2
    y.add_(1)
    squared = y.pow(2)  # keeps what is there now
    return z.sigmoid() * squared


def product_in_place(x, w):
    h = x @ w
    grown = h.exp()
    h.add_(1)
    return grown * h


class Scratch(torch.autograd.Function):
    """Doubles, in memory that it uses again."""

    @staticmethod
    def forward(ctx, x, scratch):
        scratch.numpy()[:] = x.detach().numpy()
        ctx.save_for_backward(scratch * 2)
        scratch.numpy()[:] = 0
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def function_of_its_own(x, w):
    scratch = torch.zeros(4, 8)
    grown = x.exp() * scratch  # keeps it
    return Scratch.apply(x, scratch) @ w + grown


def views(x, w):
    one, two = (x @ w).chunk(2, -1)
    return torch.cat([F.silu(one) * two, two.t().reshape(4, 4).exp()], -1).view(2, 16).t().sigmoid()


def norms(x, w):
    return F.layer_norm(x.double(), (8,)).to(x.dtype) @ w * torch.rsqrt(x.pow(2).mean(-1, True))


def dropped(x, w):
    torch.manual_seed(2)
    return F.dropout(F.gelu(x @ w), 0.5).sigmoid()


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return (F.silu(x @ w) * (x @ w)).float().softmax(-1)


def no_graph_inside(x, w):
    with torch.no_grad():
        scale = (x @ w).sigmoid()
    return (x * scale).exp() * scale


FUNCTIONS = [
    in_place, source_in_place, function_of_its_own, views, norms, dropped, autocast,
    no_graph_inside,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_made_again_is_the_same_bits(function):
    plain, selective = (gradients(function, select=select) for select in (False, True))
    for one, two in zip(plain, selective, strict=True):
        assert (one is two is None) or torch.equal(one, two)


def test_a_product_that_is_written_to_is_refused():
    with pytest.raises(RuntimeError, match="has been mutated"):
        gradients(product_in_place, select=True)


def test_products_attention_run_once():
    counts = {}
    for select in (False, True):
        torch.manual_seed(0)
        model = Llama(CONFIG)
        if select:
            recompute_layers(model, recompute="selective")
        loss = model(torch.arange(32).view(2, 16)).sum()
        with Watched() as watched:
            loss.backward()
        counts[select] = watched.names
    for name in ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert counts[True].count(name) == counts[False].count(name)
    assert counts[True].count("aten::silu") == CONFIG.num_layers > counts[False].count("aten::silu")


def test_copies_call_themselves():
    model = Llama(CONFIG)
    recompute_layers(model, recompute="selective")
    twin = copy.deepcopy(model)
    for parameter in twin.layers.parameters():
        parameter.data.zero_()
    ids = torch.arange(8)[None]
    assert not torch.equal(twin(ids), model(ids))


def train(manager, recompute, **options):
    torch.manual_seed(0)
    model = parallelize(
        Llama(CONFIG).double(), manager, recompute=recompute, **options, rehearse=False
    )
    tokens = torch.randint(32, (4, 18), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}  # uneven shares
    loss = train_step(model, shard_global_batch(batch, 1, manager), manager)
    return loss, *(p.grad for p in model.parameters())


def communicates_again(sizes):
    manager = setup_process_group_manager(**sizes)
    options = {"sequence_parallel": manager.tp_size > 1, "cp_method": "all_gather"}
    one, two = (train(manager, option, **options) for option in (False, "selective"))
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}])
def test_sequences_are_gathered_again(sizes):
    run_ranks(communicates_again, 2, sizes)
