"""Ring attention of scaletorch-cp inside your own attention layer, without the other packages.

`pip install scaletorch-cp`, then `python examples/own_attention.py`: a small decoder reads
sequences of a source file of the standard library, in one process and with every sequence in 4
shards on 4 local ranks, and compares loss and gradients.

The layer changes in one line: `ring_attention` replaces `F.scaled_dot_product_attention`.
Around it

- each rank gets its columns of the batch by `shard_batch`. Labels are shifted *before* that;
- the model gets positions, since a rank's columns are not the positions from 0 on;
- the loss is a sum over this rank's tokens, divided by the tokens of all ranks. Parameters are
  replicated, so their gradients are summed (here by `all_reduce_params`; the buckets of
  scaletorch-dp sum them during backward).

Shards are zigzag, the default of `shard_batch`, which balances causal attention; `ring_attention`
uses the same layout. For any length and packed documents use `ShardedSequences` and `attention`. A
model that calls `F.scaled_dot_product_attention` needs no change: use `apply_context_parallel`.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

from scaletorch.dist import all_reduce, all_reduce_params, get_default_group, launch
from scaletorch.parallel.context_parallel import ring_attention, shard_batch

ROWS, LENGTH, HIDDEN, HEADS, LAYERS = 2, 256, 64, 4, 2


class Attention(nn.Module):
    """Causal attention over sequences that are sharded over the ranks of `group`."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; x and the result are [B, L / ranks, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # In one process: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = ring_attention(q, k, v, is_causal=True, group=self.group)
        joined: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """One pre-norm layer: attention, then an MLP, which works position by position."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.attention = Attention(group)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the same shape."""
        x = x + self.attention(self.norms[0](x))
        mixed: Tensor = x + self.mlp(self.norms[1](x))
        return mixed


class Decoder(nn.Module):
    """A byte model with positions as an input."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.Sequential(*(Block(group) for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits [B, L / ranks, 256]."""
        logits: Tensor = self.head(self.layers(self.tokens(input_ids) + self.places(position_ids)))
        return logits


def read_batch() -> dict[str, Tensor]:
    """Return text as bytes: inputs, and labels that are already shifted, [B, L]."""
    data = bytearray(inspect.getsource(argparse).encode()[: ROWS * (LENGTH + 1)])
    rows = torch.frombuffer(data, dtype=torch.uint8).long().view(ROWS, LENGTH + 1)
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def run(dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, Tensor]]:
    """Run forward and backward on this rank; return the loss and the full gradients."""
    group = get_default_group()  # any process group; None for one process
    torch.manual_seed(0)  # the same weights on every rank
    model = Decoder(group).to(dtype)
    batch = shard_batch(read_batch(), group)
    logits = model(batch["input_ids"], batch["position_ids"])
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss = loss / (ROWS * LENGTH)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    all_reduce_params(gradients.values(), group=group, op="sum")
    total = loss.detach()
    all_reduce(total, group=group)
    return total.item(), gradients


def main() -> None:
    """Compare one process with four ranks."""
    loss, gradients = run()
    others = launch(run, 4)
    print(f"one process {loss:.6f}, four ranks {others[0][0]:.6f}")
    errors = [
        (found[name] - whole).norm() / whole.norm()
        for _, found in others
        for name, whole in gradients.items()
    ]
    worst = torch.stack(errors).max()  # Python's own max would miss a NaN
    print(f"largest relative difference of {len(gradients)} gradients on any rank: {worst:.1e}")


if __name__ == "__main__":
    main()
