"""A vision transformer in plain torch, on tensor, pipeline and data parallel ranks.

`python examples/vision_transformer.py` prints the losses of one process and of 4 local ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.parallel.pg_manager import setup_process_group_manager

SIZE, ROWS, STEPS = 32, 30, 8
PLAN = {f"blocks.*.{layer}": "column" for layer in ("qkv", "up")}
PLAN |= {f"blocks.*.{layer}": "row" for layer in ("out", "down")}


class Block(nn.Module):
    """Attention and an MLP; each head's q, k and v are adjacent, so that tp can shard heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.head_dim, self.norm1, self.norm2 = 8, nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [B, L, SIZE] to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim))
        mixed = scaled_dot_product_attention(*heads.permute(3, 0, 2, 1, 4))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x.add(self.down(gelu(self.up(self.norm2(x)))))


class VisionTransformer(nn.Module):
    """Classifies images [B, 1, 16, 16]; everything before the blocks runs in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, SIZE, 4, 4)
        self.token, self.positions = (nn.Parameter(torch.randn(1, n, SIZE)) for n in (1, 17))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 4]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def train(sizes: dict[str, int]) -> list[float]:
    """Return the losses of all steps, the same on every rank."""

    def loss_fn(output: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        return cross_entropy(output, rows["labels"], reduction="sum"), len(output)

    torch.manual_seed(0)
    manager, losses = setup_process_group_manager(**sizes), []
    model = parallelize(VisionTransformer().double(), manager, plan=PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # the same batch on every rank
        labels = torch.randint(4, (ROWS,), generator=generator)
        images = torch.rand(ROWS, 1, 16, 16, generator=generator) + labels[:, None, None, None]
        cut = shard_global_batch({"images": images.double(), "labels": labels}, 2, model=model)
        losses.append(train_step(model, cut, loss_fn=loss_fn).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for sizes in ({}, {"tp_size": 2, "dp_size": 2}, {"pp_size": 4}):
        print(*sizes, *(f"{x:.8f}" for x in launch(train, 4 if sizes else 1, sizes)[0]))
