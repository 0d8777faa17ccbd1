"""Norms of the heads: each rank sees a part of the activations, the gradient is whole."""

import copy
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import group
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import all_reduce
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.tensor_parallel import (
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    shard_dims,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve
from scaletorch.parallel.tensor_parallel.regions import replicas
from scaletorch.parallel.tensor_parallel.sharing import gradient_sums

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 16, 12, 4, 2, 6


class HeadNorm(nn.Module):
    """A norm that is not torch's own, with a bias."""

    def __init__(self, size=HEAD_DIM):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.bias = nn.Parameter(0.1 * torch.randn(size))

    def forward(self, x, *, eps=1e-6):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, norm=HeadNorm):
        super().__init__()
        self.head_dim = HEAD_DIM
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape), eps=1e-5).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        # Without positions the keys' bias has no gradient at all.
        k = k * torch.linspace(0.5, 2.0, x.shape[1], dtype=x.dtype)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)
        self.down_proj = nn.Linear(8, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.self_attn, self.mlp = Attention(norm), Mlp()

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Qwen(nn.Module):
    def __init__(self, recompute=None, norm=HeadNorm):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block(norm) for _ in range(2)])
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.lm_head(x)


def make(variant=None, **options):
    torch.manual_seed(3)
    model = Qwen(**options).double()
    if variant == "tied":  # one parameter in both norms, and one in both layers
        for layer in model.layers:
            layer.self_attn.k_norm.weight = layer.self_attn.q_norm.weight
        model.layers[1].self_attn.q_norm.bias = model.layers[0].self_attn.q_norm.bias
    if variant == "frozen":
        model.layers[0].self_attn.q_norm.weight.requires_grad_(False)
    return model


def loss_of(model, seed):
    torch.manual_seed(seed)
    ids, labels = torch.randint(0, VOCAB, (2, 5)), torch.randint(0, VOCAB, (2, 5))
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def train(model):
    """Take an SGD step on two accumulated batches, the second used twice; every gradient."""
    loss_of(model, 1).backward()
    loss = loss_of(model, 2)
    loss.backward(retain_graph=model.recompute != "reentrant")
    if model.recompute != "reentrant":
        loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return loss.detach(), grads


def as_one_process(variant, recompute, copied):
    plain = make(variant, recompute=recompute)
    model = apply_tensor_parallel(copy.deepcopy(plain), group=group.WORLD)
    if copied:
        original, model = model, copy.deepcopy(model)
        parameters = set(original.parameters())
        assert not parameters & set(model.parameters())
    norm = model.layers[0].self_attn.q_norm
    assert isinstance(norm, HeadNorm)
    assert type(norm) is type(model.layers[1].self_attn.k_norm)
    assert type(norm.weight) is nn.Parameter
    loss, grads = train(model)
    assert type(norm.weight) is nn.Parameter
    expected_loss, expected = train(plain)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    assert set(grads) == set(expected)
    names = [n for n in expected if "norm" in n]
    assert names
    assert all(shard_dims(model)[name] is None for name in names)
    for name, grad in gather_tensors(model, grads).items():
        error = relative_error(grad, expected[name])
        assert error < 1e-12, f"gradient of {name}: relative error {error:.2e}"
    state = gather_state_dict(model)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-12, atol=1e-12)
    return {name: grads[name] for name in names}


@pytest.mark.parametrize(
    ("variant", "recompute", "copied"),
    [
        (None, None, False),
        (None, "reentrant", False),
        (None, "non-reentrant", False),
        (None, None, True),
        ("tied", None, False),
        ("tied", "non-reentrant", True),
        ("frozen", "reentrant", True),
        ("frozen", None, False),
    ],
)
def test_the_gradient_is_one_process_s_and_alike_on_ranks(variant, recompute, copied):
    first, second = run_ranks(as_one_process, 2, variant, recompute, copied)
    assert ("layers.0.self_attn.q_norm.weight" in first) == (variant != "frozen")
    assert all(torch.equal(first[name], second[name]) for name in first)


def in_bfloat16():
    model = apply_tensor_parallel(make().float(), group=group.WORLD)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, 1).backward()
    plain = make().float()
    loss_of(plain, 1).backward()
    return [
        (m.layers[0].self_attn.q_norm.weight.grad, m.layers[1].self_attn.k_norm.bias.grad)
        for m in (model, plain)
    ]


def test_autocast_leaves_the_gradient_its_dtype():
    for got, expected in run_ranks(in_bfloat16, 2):
        torch.testing.assert_close(got, expected, rtol=0.1, atol=1e-3)


def failing():
    model = apply_tensor_parallel(make(), group=group.WORLD)
    norm = model.layers[0].self_attn.q_norm
    before = dict(norm.named_parameters())
    with pytest.raises(RuntimeError):
        norm(torch.ones(2, HEAD_DIM + 1, dtype=torch.float64))
    assert all(p is before[n] for n, p in norm.named_parameters())
    with torch.no_grad():
        norm(torch.ones(2, HEAD_DIM, dtype=torch.float64))


def test_a_forward_that_fails_leaves_the_parameters():
    run_ranks(failing, 2)


def test_one_rank_leaves_the_module_alone():
    model = apply_tensor_parallel(make())
    assert type(model.layers[0].self_attn.q_norm) is HeadNorm
    assert type(model.layers[0].self_attn) is Attention


def no_affine():
    return nn.RMSNorm(HEAD_DIM, elementwise_affine=False)


def test_a_norm_without_parameters_is_of_the_family_too():
    assert resolve(make(norm=no_affine), None, 2).matches


class Wide(HeadNorm):
    def __init__(self):
        super().__init__(HEADS * HEAD_DIM)


def test_what_cannot_be_summed_is_refused():
    with pytest.raises(ValueError, match=r"'layers.0.self_attn.q_norm.weight' has 24 .* has 6"):
        resolve(make(norm=Wide), None, 2)
    model = make()
    model.layers[0].self_attn.q_norm.bias = model.lm_head.weight
    with pytest.raises(ValueError, match="one tied parameter"):
        resolve(model, {"**.q_norm": "replicate", "lm_head": "column"}, 2)


def dtypes_of_sums():
    """Return the dtypes in which gradients of norms and of replicated heads are summed."""
    model = apply_tensor_parallel(make().bfloat16(), group=group.WORLD)
    found = {}
    with ExitStack() as stack:
        for module in (gradient_sums, replicas):
            own = found[module.__name__.rpartition(".")[2]] = set()

            def noting(data, group, own=own):
                own.add(data.dtype)
                all_reduce(data, group=group)

            stack.enter_context(patch.object(module, "all_reduce", noting))
        loss_of(model, 1).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    return found


def test_gradients_of_16_bits_are_summed_in_float32():
    for found in run_ranks(dtypes_of_sums, 4):
        assert found == {"gradient_sums": {torch.float32}, "replicas": {torch.float32}}
