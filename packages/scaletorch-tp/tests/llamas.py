"""Small decoders of the Llama family, and what training leaves of one and of its shards."""

import copy
from functools import partial

import torch
from torch import nn
from torch.distributed import all_reduce, get_rank, get_world_size, group
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import relative_error
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    split_by_owner,
    take_own,
)

HEAD_DIM = 4


def rotate(x):
    """Rotary positions, without which the keys' bias has no gradient at all."""
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] / 10.0 ** torch.arange(2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class HeadNorm(nn.Module):
    """A norm that is not torch's own, with a bias."""

    def __init__(self, size=HEAD_DIM):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.bias = nn.Parameter(0.1 * torch.randn(size))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight + self.bias


class Attention(nn.Module):
    """As in `transformers`: the head dim and the grouping, and no counts."""

    def __init__(self, hidden, heads, kv_heads, bias, norm):
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD_DIM, heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * HEAD_DIM, bias)
        self.k_proj = nn.Linear(hidden, kv_heads * HEAD_DIM, bias)
        self.v_proj = nn.Linear(hidden, kv_heads * HEAD_DIM, bias)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias)
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x):
        shape = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = (p(x).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class CountingAttention(Attention):
    """With counts and grouped-query attention in torch's own function."""

    def __init__(self, hidden, heads, kv_heads, bias, norm):
        super().__init__(hidden, heads, kv_heads, bias, norm)
        del self.num_key_value_groups, self.head_dim
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.width = heads * HEAD_DIM

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = self.q_norm(q.view(*x.shape[:2], self.num_heads, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(k.view(*x.shape[:2], self.num_kv_heads, HEAD_DIM)).transpose(1, 2)
        v = v.view(*x.shape[:2], self.num_kv_heads, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q), rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    def __init__(self, hidden, inner, bias):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, attention, hidden, heads, kv_heads, inner, bias, norm):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = attention(hidden, heads, kv_heads, bias, norm)
        self.mlp = Mlp(hidden, inner, bias)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(
        self,
        heads=6,
        kv_heads=6,
        vocab=13,
        hidden=10,
        inner=11,
        attention=Attention,
        recompute=None,
        biases=(True, False),
        norm=partial(nn.RMSNorm, HEAD_DIM),  # noqa: B008
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden, padding_idx=3)
        self.layers = nn.ModuleList(
            Block(attention, hidden, heads, kv_heads, inner, bias, norm) for bias in biases
        )
        self.norm = nn.RMSNorm(hidden)
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.norm(x)


STYLES = {
    "embed_tokens": "embedding_rowwise",
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
HEAD = {"lm_head": "colwise_gather_output"}


class Llama(Decoder):
    """The names of a bare model: embed_tokens, layers, norm, lm_head."""

    _tp_plan = STYLES | HEAD

    def __init__(self, tied=False, **options):
        super().__init__(**options)
        self.lm_head = nn.Linear(*self.embed_tokens.weight.shape[::-1], bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(super().forward(ids))


OWN_PLAN = {
    "embed_tokens": "vocab",
    "**.self_attn": Divide("num_heads", "num_kv_heads", "width"),
    "**.self_attn.o_proj": "row",
    "**.gate_proj": "column",
    "**.up_proj": "column",
    "**.down_proj": "row",
    "lm_head": "column_gather",
    **{f"**.{name}_proj": "column" for name in "qkv"},
}


def make(kind=Llama, *, seed=11, change=None, **options):
    torch.manual_seed(seed)
    model = kind(**options).double()
    if change == "norms tied":  # one parameter in both norms, and one in both layers
        for layer in model.layers:
            layer.self_attn.k_norm.weight = layer.self_attn.q_norm.weight
        model.layers[1].self_attn.q_norm.bias = model.layers[0].self_attn.q_norm.bias
    if change == "norm frozen":
        model.layers[0].self_attn.q_norm.weight.requires_grad_(False)
    return model


def loss_of(model, seed):
    """Return the loss of a batch of two sequences, and the logits."""
    torch.manual_seed(seed)
    ids, labels = torch.randint(0, 11, (2, 2, 5))
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), labels.flatten()), out.detach()


def train(model):
    """Take an unclipped SGD step on two batches, the second used twice; what it leaves behind."""
    loss_of(model, 0)[0].backward()
    loss, out = loss_of(model, 1)
    again = getattr(model, "recompute", None) != "reentrant"
    loss.backward(retain_graph=again)
    if again:
        loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.3 * p.grad
    return out, loss.detach(), grads


def close(got, expected, what):
    scale = expected.abs().max().clamp(min=1e-2)  # the bias of a key has only rounding
    error = relative_error(got, expected, scale=scale)
    assert error < 1e-12, f"{what}: relative error {error:.2e}"


def require_same_gradients(one, many, rtol=0):
    """Compare the gradients of a model and of its shards; all that one has the other has, too."""
    own = {n: p.grad for n, p in many.named_parameters() if p.grad is not None}
    found = gather_tensors(many, own)
    expected = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=1e-12, msg=name)


def compare(one, many, *inputs, rtol=0):
    """Compare the outputs of a model and of its shards, and the gradients that they add."""
    outputs = [model(*inputs) for model in (one, many)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
    for output in outputs:
        output.square().mean().backward()
    require_same_gradients(one, many, rtol)


def as_one_process(plain, plan=None, *, asynchronous=False, copied=False, **options):
    """Train a model and its shards alike; return the shards' model and its gradients."""
    told = explain(plain, get_world_size(), plan, **options)
    model = apply_tensor_parallel(copy.deepcopy(plain), plan, group.WORLD, **options)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes.items() <= {p.name: p.local_shapes[get_rank()] for p in told.parameters}.items()
    state = gather_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_full_state_dict(model, state)
    if copied:
        original, model = model, copy.deepcopy(model)
        assert not {*original.parameters()} & {*model.parameters()}
    for module in model.modules():
        if hasattr(module, "async_all_reduce"):
            module.async_all_reduce = asynchronous
    out, loss, grads = train(model)
    expected_out, expected_loss, expected = train(plain)
    close(out, expected_out, "outputs")
    close(loss, expected_loss, "loss")
    assert set(grads) == set(expected)  # tied parameters stayed tied
    for name, grad in gather_tensors(model, grads).items():
        close(grad, expected[name], f"gradient of {name}")
        close(grads[name], take_own(model, name, expected[name]), f"own gradient of {name}")
    state = gather_state_dict(model)
    assert list(state) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        close(state[name], weight, f"stepped {name}")
    # Each element counts once in the norm.
    owned = split_by_owner(model, grads)
    mine = [piece for pieces in owned.values() for owner, piece in pieces if owner == get_rank()]
    total = torch.as_tensor(sum(piece.square().sum() for piece in mine), dtype=torch.float64)
    all_reduce(total)
    close(total, sum(g.square().sum() for g in expected.values()), "squared norm")
    return model, grads


def whole_names(model):
    """Return the names of parameters that every rank has whole."""
    return [name for name, dim in shard_dims(model).items() if dim is None]
