"""Whole models: every layout trains as one process does."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import group
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    shard_dims,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 24, 8, 4, 6, 40


def rotate(x):
    """Rotary positions, without which the keys' bias has no gradient at all."""
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] / 10.0 ** torch.arange(3)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias)

    def forward(self, x):
        def heads(y, count):
            return y.view(*y.shape[:2], count, HEAD_DIM).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            rotate(heads(self.q_proj(x), self.num_heads)),
            rotate(heads(self.k_proj(x), self.num_kv_heads)),
            heads(self.v_proj(x), self.num_kv_heads),
            is_causal=True,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class HeadDimAttention(Attention):
    """As `transformers` has it: no counts, the head dim and a size of -1."""

    def __init__(self, bias):
        super().__init__(bias)
        del self.num_heads, self.num_kv_heads
        self.head_dim = HEAD_DIM
        self.num_heads_is = -1

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, bias, attention):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = attention(bias)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.mlp = Mlp(bias)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, bias=False, attention=Attention, recompute=None):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.layers = nn.ModuleList([Block(bias, attention) for _ in range(2)])
        self.norm = nn.RMSNorm(HIDDEN)
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.norm(x)


class Llama(Decoder):
    """The names of a bare model: embed_tokens, layers, norm, lm_head."""

    def __init__(self, tied=False, **options):
        super().__init__(**options)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(super().forward(ids))


class CausalLM(nn.Module):
    """The names of `transformers`: model.layers and so on."""

    def __init__(self, tied=False, **options):
        super().__init__()
        self.model = Decoder(**options, attention=HeadDimAttention)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def make(kind, dtype=torch.float64, seed=11, **options):
    torch.manual_seed(seed)
    return kind(**options).to(dtype)


def batch(seed=5):
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (2, 7)), torch.randint(0, VOCAB, (2, 7))


def step(model, lr=0.5, seed=5):
    """Take one unclipped SGD step; the outputs, the loss and every gradient."""
    ids, labels = batch(seed)
    before = ids.clone()
    out = model(ids)
    loss = F.cross_entropy(out.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
    assert torch.equal(ids, before)
    return out.detach(), loss.detach(), grads


def close(got, expected, what):
    error = relative_error(got, expected)
    assert error < 1e-12, f"{what}: relative error {error:.2e}"


def as_one_process(kind, options, asynchronous=False):
    plain = make(kind, **options)
    model = apply_tensor_parallel(copy.deepcopy(plain), group=group.WORLD)
    for module in model.modules():
        if hasattr(module, "async_all_reduce"):
            module.async_all_reduce = asynchronous
    out, loss, grads = step(model)
    expected_out, expected_loss, expected_grads = step(plain)
    close(out, expected_out, "outputs")
    close(loss, expected_loss, "loss")
    assert set(grads) == set(expected_grads)  # tied parameters stayed tied
    for name, grad in gather_tensors(model, grads).items():
        close(grad, expected_grads[name], f"gradient of {name}")
    state = gather_state_dict(model)
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for name, weight in state.items():
        close(weight, expected[name], f"stepped {name}")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Llama, {}),
        (Llama, {"tied": True, "bias": True}),
        (CausalLM, {"bias": True}),
        (CausalLM, {"tied": True}),
    ],
    ids=["plain", "tied-bias", "prefixed-bias", "prefixed-tied"],
)
def test_trains_as_one_process(tp, kind, options):
    run_ranks(as_one_process, tp, kind, options)


@pytest.mark.parametrize("form", ["reentrant", "non-reentrant"])
def test_recomputation_changes_nothing(form):
    run_ranks(as_one_process, 2, Llama, {"recompute": form, "bias": True, "tied": True})


def test_overlapped_all_reduce_changes_nothing():
    run_ranks(as_one_process, 2, Llama, {"bias": True}, asynchronous=True)


def in_bfloat16(autocast):
    """Squared errors of outputs and gradients against float64: one process's, then ours."""
    errors = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(6):
        weights = make(Llama, torch.bfloat16, seed, bias=True).state_dict()
        reference = make(Llama, bias=True)
        reference.load_state_dict(weights)
        out, _, grads = step(reference, seed=seed)
        for sharded in (False, True):
            model = make(Llama, torch.float32 if autocast else torch.bfloat16, bias=True)
            model.load_state_dict(weights)
            if sharded:
                apply_tensor_parallel(model, group=group.WORLD)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                got_out, _, got = step(model, seed=seed)
            assert got_out.dtype == torch.bfloat16
            got = gather_tensors(model, got)
            errors[sharded, 0] += (got_out - out).square().sum()
            errors[sharded, 1] += sum((got[n] - grads[n]).square().sum() for n in grads)
    return errors.sqrt().tolist()


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_bfloat16_loses_no_more_than_in_one_process(autocast, tp):
    one, sharded = run_ranks(in_bfloat16, tp, autocast)[0]
    assert sharded[0] < 1.25 * one[0]
    assert sharded[1] < 1.25 * one[1]


def replicas_agree():
    model = apply_tensor_parallel(make(Llama, tied=True), group=group.WORLD)
    for _ in range(3):
        model.zero_grad()
        step(model)
    whole = [n for n, dim in shard_dims(model).items() if dim is None]
    parameters = dict(model.named_parameters())
    return {n: parameters[n].detach() for n in whole}


def test_replicated_parameters_stay_bitwise_equal():
    first, *others = run_ranks(replicas_agree, 4)
    assert set(first) >= {"norm.weight", "layers.0.input_layernorm.weight"}
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def heads_are_divided():
    bare = apply_tensor_parallel(make(Llama), group=group.WORLD)
    prefixed = apply_tensor_parallel(make(CausalLM), group=group.WORLD)
    attention = bare.layers[1].self_attn
    other = prefixed.model.layers[0].self_attn
    return attention.num_heads, attention.num_kv_heads, other.head_dim, other.num_heads_is


def test_known_families_divide_the_head_counts_a_module_has():
    assert run_ranks(heads_are_divided, 4) == [(2, 1, HEAD_DIM, -1)] * 4


def by_own_plan():
    plan = {
        "**.self_attn": Divide("num_heads", "num_kv_heads"),
        "layers.*.self_attn.?_proj": "column",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "**.norm": "replicate",
    }
    model = make(Llama)
    with pytest.raises(ValueError, match="expected an input") as caught:
        # o_proj is column parallel here: its input is a shard, which is not its whole input.
        apply_tensor_parallel(model, plan, group.WORLD)(batch()[0])
    return str(caught.value)


def test_a_plan_that_does_not_compose_is_an_error_of_the_layer():
    for rank, message in enumerate(run_ranks(by_own_plan, 2)):
        assert f"rank {rank}" in message
        assert "last dim 48" in message
        assert "(2, 7, 24)" in message


def under_a_wrapper():
    plain = make(Llama, tied=True)
    model = ModuleWrapper(apply_tensor_parallel(copy.deepcopy(plain), group=group.WORLD))
    assert shard_dims(model) == shard_dims(model.module)
    assert shard_dims(model)["layers.0.self_attn.o_proj.weight"] == 1
    assert shard_dims(model)["lm_head.weight"] == 0
    state = gather_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_state_is_seen_through_a_wrapper():
    run_ranks(under_a_wrapper, 2)
