"""Small models with the names of GPT-2, with packed weights, and with every kind of shard."""

import torch
from torch import nn
from torch.nn import functional as F

from scaletorch.parallel.tensor_parallel import Divide, Fused

VOCAB, HIDDEN, HEADS, LENGTH = 13, 24, 4, 7


class Conv1D(nn.Module):
    """A transposed linear layer, as transformers names it."""

    def __init__(self, nf, nx, bias=True):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1) if bias else None

    def forward(self, x):
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


def linear(nf, nx):
    return nn.Linear(nx, nf)


def attend(q, k, v, head_dim):
    q, k, v = (t.view(*t.shape[:2], -1, head_dim).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Gpt2Attention(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.num_heads, self.split_size, self.embed_dim = HEADS, HIDDEN, HIDDEN
        self.head_dim = HIDDEN // HEADS
        self.c_attn, self.c_proj = dense(3 * HIDDEN, HIDDEN), dense(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        assert q.shape[-1] == self.num_heads * self.head_dim
        return self.c_proj(attend(q, k, v, self.head_dim))


class Gpt2Block(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = Gpt2Attention(dense)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = dense(30, HIDDEN), dense(HIDDEN, 30)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class Gpt2(nn.Module):
    def __init__(self, dense=Conv1D):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, HIDDEN),
                "wpe": nn.Embedding(LENGTH, HIDDEN),
                "h": nn.ModuleList(Gpt2Block(dense) for _ in range(2)),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids):
        parts = self.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1]))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


class Packed(nn.Module):
    """Grouped-query attention from one weight, and a gated MLP from one."""

    def __init__(self, key_values=2):
        super().__init__()
        self.head_dim, self.sizes = 3, (HEADS * 3, key_values * 3, key_values * 3)
        self.num_heads, self.num_kv_heads = HEADS, key_values
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, sum(self.sizes))
        self.out = nn.Linear(HEADS * 3, HIDDEN)
        self.mlp = nn.Module()
        self.mlp.gate_up = nn.Linear(HIDDEN, 2 * 9, bias=False)
        self.mlp.down = nn.Linear(9, HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        lengths = [n * self.head_dim for n in (self.num_heads, *[self.num_kv_heads] * 2)]
        x = x + self.out(attend(*self.qkv(x).split(lengths, -1), self.head_dim))
        gate, up = self.mlp.gate_up(x).chunk(2, -1)
        return x + self.mlp.down(F.silu(gate) * up)


PACKED = {
    "": Divide("num_heads", "num_kv_heads"), "qkv": Fused("column", (12, 6, 6)), "out": "row",
    "mlp.gate_up": Fused("column", 2), "mlp.down": "row",
}  # fmt: skip


class GroupedHeads(nn.Module):
    """With 4 query heads and 2 key/value heads: at tp 4 each of these is on two ranks."""

    def __init__(self, hidden):
        super().__init__()
        self.head_dim = 2
        self.q_proj, self.k_proj = nn.Linear(hidden, 8), nn.Linear(hidden, 4)
        self.v_proj, self.o_proj = nn.Linear(hidden, 4), nn.Linear(8, hidden)


class FusedHeads(nn.Module):
    """The same with queries, keys and values in one weight."""

    def __init__(self, hidden):
        super().__init__()
        self.head_dim = 2
        self.qkv, self.out = nn.Linear(hidden, 8 + 4 + 4), nn.Linear(8, hidden)


class EveryShard(nn.Module):
    """A module of every kind of shard, which is never called."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 10)
        self.attention, self.fused = GroupedHeads(10), FusedHeads(10)
        self.gate_up = nn.Linear(10, 2 * 7)
        self.down, self.joined = nn.Linear(7, 10).bfloat16(), nn.Linear(13, 10)
        self.packed = Conv1D(6 + 5 + 4, 10)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 13, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight


EVERY_SHARD = {
    "embed": "vocab",
    **{f"attention.{x}_proj": "column" for x in "qkv"},
    "attention.o_proj": "row",
    "fused.qkv": Fused("column", (8, 4, 4)),
    "fused.out": "row",
    "gate_up": Fused("column", 2),
    "packed": Fused("column", (6, 5, 4)),
    "joined": Fused("row", (4, 4, 5)),
    "down": "row",
    "head": "column_gather",
}
