"""Selective recomputation: the same bits, less kept, nothing dear run twice."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.compose import parallelize, select_layers, shard_global_batch, train_step
from scaletorch.compose.selective import Selected, _Again
from scaletorch.dist import functional
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.plan.memory.measured import Kept

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


def both(function, *, backwards=1, selected=True):
    """Return the gradients and the bytes kept, plain and selective."""
    found = []
    for run in (None, Selected):
        layer = Layer(function)
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        kept = Kept(layer)
        with kept:
            out = run(layer).run(layer.forward, x) if run else layer(x)
            loss = out.pow(2).sum()
            for _ in range(backwards):
                loss.backward(retain_graph=backwards > 1)
        found.append((out.detach(), x.grad, layer.weight.grad, kept.most))
    plain, selective = found
    for one, two in zip(plain[:3], selective[:3], strict=True):
        assert (one is two is None) or torch.equal(one, two)
    return plain[3], selective[3]


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


def kept_and_changed(x, w):
    h = x @ w
    grown = h.double().exp().float()  # of which h is kept
    h.add_(1)
    return grown * h


def dearer_made_again(x, w):
    return (x @ w + x @ w.t()).pow(2)  # two tensors for one


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


def summed_in_place(x, w):
    squared = x.pow(2)
    largest = (x * 2).detach()
    dist.all_reduce(largest)  # in place, which no version tells
    return (x * largest).exp() + squared


FUNCTIONS = [
    in_place, source_in_place, kept_and_changed, dearer_made_again, function_of_its_own, views,
    norms, dropped, autocast, no_graph_inside,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_what_is_made_again_is_the_same_bits(function, backwards):
    plain, selective = both(function, backwards=backwards)
    assert selective <= plain


UNARY = [
    torch.exp, torch.sigmoid, F.silu, F.gelu, torch.tanh, torch.clone,
    lambda t: t.double().float(), lambda t: t.flip(0), lambda t: t.t().contiguous().t(),
]  # fmt: skip
BINARY = [torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: a @ b.softmax(-1).T @ a]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), max_size=12))
def test_any_chain_of_operations_is_the_same_bits(steps):
    def chain(x, w):
        made = [x @ w, x]
        for kind, one, two in steps:
            a, b = made[one % len(made)], made[two % len(made)]
            if kind % 3 == 0:
                made.append(BINARY[kind % len(BINARY)](a, b))
            elif kind % 7 == 0 and a is not x:
                a.mul_(0.5)  # may be refused by autograd, with and without
            else:
                made.append(UNARY[kind % len(UNARY)](a))
            made[-1] = made[-1] / (1 + made[-1].detach().abs().max())
        return sum(made)

    try:
        layer = Layer(chain)
        layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
    except RuntimeError:
        return
    both(chain)


def test_gradients_of_gradients():
    found = []
    for run in (None, Selected):
        layer = Layer(lambda x, w: F.silu(x @ w) * (x @ w).sigmoid())
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        out = run(layer).run(layer.forward, x) if run else layer(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        found.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_products_attention_and_draws_run_once():
    counts = {}
    for select in (False, True):
        torch.manual_seed(0)
        model = Llama(CONFIG)
        if select:
            select_layers(model)
        loss = model(torch.arange(32).view(2, 16)).sum()
        with Watched() as watched:
            loss.backward()
        counts[select] = watched.names
    for name in ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert counts[True].count(name) == counts[False].count(name)
    assert counts[True].count("aten::silu") == CONFIG.num_layers > counts[False].count("aten::silu")


def test_a_tensor_is_made_once_for_its_users_and_let_go():
    made = []

    def make(sources):
        made.append(sources)
        return torch.ones(1)

    again = _Again(make, [])
    again.users = 2
    for times in (1, 2):
        assert again.get() is again.get()
        assert len(made) == times


def test_what_is_changed_after_the_layer_is_an_error():
    layer = Layer(lambda x, w: (F.silu(x @ w) * (x @ w).sigmoid()).exp() * 2)
    hidden = torch.randn(4, 8, requires_grad=True) * 1
    out = Selected(layer).run(layer.forward, hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(
        StateError, match=r"shape \(4, 8\) that backward needs was changed in place"
    ):
        out.sum().backward()


def test_copies_call_themselves_and_less_is_kept():
    kept = {}
    for select in (False, True):
        model = Llama(CONFIG)
        if select:
            select_layers(model)
        seen = Kept(model)
        with seen:
            model(torch.zeros(2, 64, dtype=torch.long)).sum().backward()
        kept[select] = seen.most
    assert kept[True] < 0.65 * kept[False]
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
    kept = Kept(model)
    with kept:
        loss = train_step(model, shard_global_batch(batch, 1, manager), manager)
    return kept.most, loss, *(p.grad for p in model.parameters())


def shared_unevenly(x, w):
    # Rank 0 has all, and gains nothing by another gather; rank 1 does.
    rows = [len(x), 0]
    own = (x @ w)[: rows[dist.get_rank()]].clone()
    return functional.all_gather(own, 0, sizes=rows).pow(2)


def two_bits():
    both(summed_in_place)
    both(shared_unevenly)


def test_ranks_agree_and_what_they_write_is_kept():
    run_ranks(two_bits, 2)


def gathers_again(sizes):
    manager = setup_process_group_manager(**sizes)
    options = {"sequence_parallel": manager.tp_size > 1, "cp_method": "all_gather"}
    plain, *one = train(manager, False, **options)
    selective, *two = train(manager, "selective", **options)
    assert all(map(torch.equal, one, two))
    return plain, selective


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}])
def test_sequences_are_gathered_again(sizes):
    for plain, selective in run_ranks(gathers_again, 2, sizes):
        assert selective < 0.65 * plain
