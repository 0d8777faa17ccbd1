"""A tensor parallel plan for a model outside the built-in tables: `PLAN`, of 7 lines.

`python examples/own_plan.py` prints the losses of one process and of 4 local ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.tensor_parallel import Divide, Fused

SIZE, HEADS, PAIRS, LENGTH, WORDS, STEPS = 32, 8, 4, 4, 64, 6

PLAN = {
    # Queries, keys and values in one weight: each rank has a shard of each of the three.
    "blocks.*.mix.into": Fused("column", (HEADS * LENGTH, PAIRS * LENGTH, PAIRS * LENGTH)),
    "blocks.*.mix.back": "row",
    "blocks.*.mix": Divide("heads", "pairs"),  # these attributes become local head counts
    # The norm of each head is replicated; its gradient is summed without an entry here.
    "blocks.*.wide": Fused("column", 2),  # gate and up
    "blocks.*.narrow": "row",
    "words": "vocab",  # rows of the embedding, which is tied to the head
    "head": "column_gather",
}


class Mix(nn.Module):
    """Attention with two query heads for each key head, and one norm for all query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.pairs = HEADS, PAIRS
        self.into = nn.Linear(SIZE, (HEADS + 2 * PAIRS) * LENGTH)
        self.norm, self.back = nn.RMSNorm(LENGTH), nn.Linear(HEADS * LENGTH, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [B, L, SIZE] to the same shape."""
        sizes = [count * LENGTH for count in (self.heads, self.pairs, self.pairs)]
        q, k, v = (y.unflatten(-1, (-1, LENGTH)) for y in self.into(x).split(sizes, -1))
        q, k, v = (y.transpose(1, 2) for y in (self.norm(q), k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.back(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(SIZE), Mix()
        self.wide, self.narrow = nn.Linear(SIZE, 4 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [B, L, SIZE] to the same shape."""
        x = x + self.mix(self.norm(x))
        gate, up = self.wide(self.norm(x)).chunk(2, -1)
        return x.add(self.narrow(silu(gate) * up))


class Model(nn.Module):
    """A language model whose head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, SIZE), nn.LayerNorm(SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ids [B, L] to logits [B, L, WORDS]."""
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(sizes: dict[str, int], plan: Mapping[str, object] = PLAN) -> list[float]:
    """Return the losses of all steps, the same on every rank."""
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    model = parallelize(Model().double(), manager, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(WORDS, (4, 13), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        losses.append(train_step(model, shard_global_batch(batch, 2, manager)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for tp, pp, cp in ((1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)):
        sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp}
        found = launch(train, tp * pp * cp, sizes)[0]
        print(*(f"{loss:.8f}" for loss in found), sizes)
