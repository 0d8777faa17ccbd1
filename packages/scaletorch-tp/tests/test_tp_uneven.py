"""Sizes that tp does not divide, and fewer key/value heads than ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import all_reduce, get_rank, group
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.placement import Cut
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    split_by_owner,
    take_own,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

HEAD_DIM = 4


def rotate(x):
    """Rotary positions, without which the keys' bias has no gradient at all."""
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] / 10.0 ** torch.arange(2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """As in `transformers`: the head dim and the grouping, and no counts."""

    def __init__(self, hidden, heads, kv_heads, bias):
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD_DIM, heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * HEAD_DIM, bias)
        self.k_proj = nn.Linear(hidden, kv_heads * HEAD_DIM, bias)
        self.v_proj = nn.Linear(hidden, kv_heads * HEAD_DIM, bias)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM) for _ in range(2))

    def forward(self, x):
        shape = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = (p(x).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class CountingAttention(Attention):
    """With counts and grouped-query attention in torch's own function."""

    def __init__(self, hidden, heads, kv_heads, bias):
        super().__init__(hidden, heads, kv_heads, bias)
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
    def __init__(self, attention, hidden, heads, kv_heads, inner, bias):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = attention(hidden, heads, kv_heads, bias)
        self.mlp = Mlp(hidden, inner, bias)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class Llama(nn.Module):
    def __init__(
        self,
        heads=6,
        kv_heads=6,
        vocab=13,
        hidden=10,
        inner=11,
        attention=Attention,
        recompute=None,
        tied=False,
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden, padding_idx=3)
        self.layers = nn.ModuleList(
            Block(attention, hidden, heads, kv_heads, inner, bias) for bias in (True, False)
        )
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.recompute = recompute
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.lm_head(self.norm(x))


OWN_PLAN = {
    "embed_tokens": "vocab",
    "**.self_attn": Divide("num_heads", "num_kv_heads", "width"),
    "**.self_attn.o_proj": "row",
    "**.gate_proj": "column",
    "**.up_proj": "column",
    "**.down_proj": "row",
    "lm_head": "column_gather",
}
OWN_PLAN |= {f"**.{name}_proj": "column" for name in "qkv"}


def make(seed=11, **options):
    torch.manual_seed(seed)
    return Llama(**options).double()


def train(model, vocab, passes=2):
    """Take an unclipped SGD step on accumulated batches; the loss and every gradient."""
    for seed in range(passes):
        torch.manual_seed(seed)
        ids, labels = torch.randint(0, vocab, (2, 5)), torch.randint(0, vocab, (2, 5))
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.3 * p.grad
    return loss.detach(), grads


def close(got, expected, what):
    error = relative_error(got, expected)
    assert error < 1e-12, f"{what}: relative error {error:.2e}"


def as_one_process(options, plan=None, asynchronous=False):
    vocab = options.get("vocab", 13)
    plain = make(**options)
    model = apply_tensor_parallel(copy.deepcopy(plain), plan, group.WORLD)
    for module in model.modules():
        if hasattr(module, "async_all_reduce"):
            module.async_all_reduce = asynchronous
    loss, grads = train(model, vocab)
    expected_loss, expected = train(plain, vocab)
    close(loss, expected_loss, "loss")
    for name, grad in gather_tensors(model, grads).items():
        close(grad, expected[name], f"gradient of {name}")
        close(grads[name], take_own(model, name, expected[name]), f"own gradient of {name}")
    for name, weight in gather_state_dict(model).items():
        close(weight, plain.state_dict()[name], f"stepped {name}")
    # Each element counts once in the norm.
    owned = split_by_owner(model, grads)
    mine = [piece for pieces in owned.values() for owner, piece in pieces if owner == get_rank()]
    total = sum(piece.square().sum() for piece in mine)
    total = torch.as_tensor(total, dtype=torch.float64)
    all_reduce(total)
    close(total, sum(g.square().sum() for g in expected.values()), "squared norm")
    attention = model.layers[0].self_attn
    sizes = [getattr(attention, n).weight.shape[0] // HEAD_DIM for n in ("q_proj", "k_proj")]
    parts = {(n, owner): g for n in grads if "k_proj" in n for owner, g in owned[n]}
    return sizes, parts


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "expected"),
    [
        (4, 6, 6, [[2, 2], [2, 2], [1, 1], [1, 1]]),
        (4, 8, 2, [[2, 1], [2, 1], [2, 1], [2, 1]]),
        (4, 6, 3, [[1, 1], [1, 1], [2, 1], [2, 1]]),
        (4, 6, 2, [[2, 1], [1, 1], [2, 1], [1, 1]]),
        (3, 4, 1, [[2, 1], [1, 1], [1, 1]]),
        (2, 6, 3, [[4, 2], [2, 1]]),
        (1, 6, 2, [[6, 2]]),
    ],
)
def test_heads_that_do_not_divide_train_as_one_process(tp, heads, kv_heads, expected):
    results = run_ranks(as_one_process, tp, {"heads": heads, "kv_heads": kv_heads})
    assert [sizes for sizes, _ in results] == expected
    held = {}
    for _, parts in results:  # replicas have the same bits
        for key, grad in parts.items():
            assert torch.equal(grad, held.setdefault(key, grad))


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "reentrant"},
        {"recompute": "non-reentrant", "tied": True},
        {"attention": CountingAttention, "tied": True},
    ],
    ids=str,
)
def test_recomputation_ties_and_counts_change_nothing(options):
    run_ranks(as_one_process, 4, {"heads": 6, "kv_heads": 2, **options})


def test_a_plan_of_ones_own_is_cut_at_heads_too():
    for kv_heads in (6, 3):
        options = {"kv_heads": kv_heads, "attention": CountingAttention}
        run_ranks(as_one_process, 4, options, OWN_PLAN, asynchronous=True)
    plan = {name: style for name, style in OWN_PLAN.items() if name != "**.self_attn"}
    run_ranks(as_one_process, 4, {"kv_heads": 2}, plan)


def test_a_vocabulary_of_50257():
    options = {"vocab": 50257, "hidden": 2, "inner": 4, "heads": 4, "kv_heads": 4, "tied": True}
    run_ranks(as_one_process, 4, options)


def round_trip(state, options):
    """Load a whole state into another model and give it back."""
    model = ModuleWrapper(apply_tensor_parallel(make(1, **options), group=group.WORLD))
    load_full_state_dict(model, state)
    own = {name: take_own(model, name, whole) for name, whole in state.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(own[name], parameter), name
    assert set(shard_dims(model)) == set(own)
    with pytest.raises(ValueError, match=r"has shape \(1, 10\), but the whole has 8 along dim 0"):
        take_own(model, "layers.0.self_attn.k_proj.weight", torch.ones(1, 10))
    return gather_state_dict(copy.deepcopy(model))


def test_state_goes_round_uneven_sizes_bit_for_bit():
    options = {"heads": 6, "kv_heads": 2}
    plain = state = make(**options).state_dict()
    for tp in (4, 3, 2):
        results = run_ranks(round_trip, tp, state, options)
        state = results[-1]
        for result in results:
            assert list(result) == list(plain)
            assert all(torch.equal(result[n], t) for n, t in plain.items())


def replicas_step():
    """Adam on replicas: their states stay equal, and are gathered once."""
    model = apply_tensor_parallel(make(heads=4, kv_heads=1).float(), group=group.WORLD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randint(0, 13, (2, 5))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "layers.0.self_attn.v_proj.weight"
    weight = model.get_parameter(name)
    state = optimizer.state[weight]["exp_avg"]
    assert torch.equal(gather_tensors(model, {name: state})[name], state)
    return weight.detach(), state


def test_replicas_stay_bitwise_equal():
    first, *others = run_ranks(replicas_step, 4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def frozen_replicas():
    model = make(heads=4, kv_heads=2)
    model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    apply_tensor_parallel(model, group=group.WORLD)
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        expected = model(ids)
    out = model(ids)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert model.layers[0].self_attn.k_proj.weight.grad is None
    assert model.layers[0].self_attn.k_proj.bias.grad is not None


def test_a_frozen_replica_gets_no_gradient():
    run_ranks(frozen_replicas, 4)


def values(model, plan, tp, name):
    resolved = resolve(model, plan, tp)
    return resolved.attributes[model.layers[0].self_attn].get(name)


def test_attributes_follow_the_heads_by_their_meaning():
    plain = make(heads=6, kv_heads=2)
    assert values(plain, None, 4, "num_key_value_groups") == (2, 1, 2, 1)
    assert values(plain, None, 4, "head_dim") is None
    counting = make(heads=8, kv_heads=2, attention=CountingAttention)
    assert values(counting, OWN_PLAN, 4, "num_heads") == (2, 2, 2, 2)
    assert values(counting, OWN_PLAN, 4, "num_kv_heads") == (1, 1, 1, 1)
    assert values(counting, OWN_PLAN, 4, "width") == (8, 8, 8, 8)
    # 4 heads of 4 over 3 ranks: as a count and as the length of the one key/value head.
    same = make(heads=4, kv_heads=1, attention=CountingAttention)
    same.layers[0].self_attn.width = 4
    assert values(same, OWN_PLAN, 3, "num_heads") == (2, 1, 1)
    assert values(same, OWN_PLAN, 3, "width") == (4, 4, 4)


@pytest.mark.parametrize(
    ("options", "tp", "texts"),
    [
        ({"heads": 6}, 7, ["query heads of layers.0.self_attn = 6", "sizes up to 6 are legal"]),
        ({"vocab": 4}, 5, ["embed_tokens.num_embeddings = 4", "sizes up to 4 are legal"]),
        ({"inner": 3}, 4, ["mlp.gate_proj.out_features = 3", "and 2 more", "up to 3"]),
    ],
)
def test_what_leaves_a_rank_nothing_names_what_would_do(options, tp, texts):
    with pytest.raises(ValueError, match=f"tp = {tp} leaves ranks without a share of") as caught:
        resolve(make(**options), None, tp)
    for text in texts:
        assert text in str(caught.value)


def test_projections_that_do_not_fit_together_must_divide():
    plan = {"**.self_attn.q_proj": "column"}
    with pytest.raises(ValueError, match=r"tp = 5 does not divide .*q_proj.out_features = 24"):
        resolve(make(), plan, 5)
    attribute = {"layers.0": Divide("count")}
    model = make()
    model.layers[0].count = 6
    with pytest.raises(ValueError, match=r"tp = 4 does not divide layers.0.count = 6; .* 3 and 6"):
        resolve(model, attribute, 4)
    both = attribute | {"embed_tokens": "vocab"}
    with pytest.raises(ValueError, match=r"count = 6 and leaves ranks .* sizes are 6$"):
        resolve(model, both, 14)


def test_a_tie_of_unlike_cuts_is_refused():
    model = make(heads=6, kv_heads=6, hidden=24)
    model.layers[0].mlp.down_proj = nn.Linear(24, 24, bias=False)
    model.layers[0].mlp.down_proj.weight = model.layers[0].self_attn.o_proj.weight
    with pytest.raises(ValueError, match=r"tied parameter.* into 8, 8, 4, 4 .* into 6, 6, 6, 6"):
        resolve(model, None, 4)


def replicas_gathered():
    """Of replicas one is taken into the whole output, and into the whole weight."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 7).double()
    cut = Cut.of((4, 3), (0, 0, 1))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    for asynchronous in (False, True):
        # Shards are made with the gradients that there are.
        x.grad = mine.grad = plain.weight.grad = plain.bias.grad = None
        options = {"gather_output": True, "async_all_reduce": asynchronous}
        layer = ColumnParallelLinear.from_plain(plain, group=group.WORLD, cut=cut, **options)
        weight = torch.arange(14.0, dtype=torch.float64).view(2, 7)
        (plain(x) * weight).sum().backward()
        (layer(mine) * weight).sum().backward()
        close(mine.grad, x.grad, "input gradient")
        grads = gather_tensors(layer, {n: p.grad for n, p in layer.named_parameters()})
        for name, parameter in plain.named_parameters():
            close(grads[name], parameter.grad, name)
            close(getattr(layer, name).grad, take_own(layer, name, parameter.grad), f"own {name}")
    own = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for [(owner, _)] in split_by_owner(layer, own).values():
        assert owner == (0, 0, 2)[get_rank()]


def test_an_output_of_replicas_is_gathered_once():
    run_ranks(replicas_gathered, 3)
