"""A small diffusion transformer whose pipeline also sends the condition of the blocks.

`python examples/diffusion_transformer.py` prints the losses of one process and of 4 local ranks.
"""

import torch
from torch import Tensor, nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.parallel.pg_manager import setup_process_group_manager

SIZE, ROWS = 32, 14


class Block(nn.Module):
    """Attention and an MLP, with norms that a condition scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False)
        self.modulation = nn.Linear(SIZE, 3 * SIZE)
        self.attention = nn.MultiheadAttention(SIZE, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map hidden states [B, L, SIZE] to the same shape; the condition is [B, SIZE]."""
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, h, h, need_weights=False)[0]
        return x.add(self.mlp(self.norm(x)))


class Denoiser(nn.Module):
    """Predicts the noise in latents [B, L, 4]; time [B] is the share of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.time = nn.Linear(4, SIZE), nn.Linear(1, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(SIZE, 4)

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        """Return the noise, [B, L, 4]."""
        latents, condition = self.inputs(latents), self.time(time[:, None])
        for block in self.blocks:
            latents = block(latents, condition)
        latents = self.head(latents)
        return latents


def batch(step: int) -> dict[str, Tensor]:
    """Return the global batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    clean, noise = torch.randn(2, ROWS, 9, 4, generator=generator).double()
    time = torch.rand(ROWS, generator=generator).double()
    return {"latents": clean.lerp(noise, time[:, None, None]), "time": time, "loss_noise": noise}


def train(sizes: dict[str, int]) -> list[float]:
    """Return the losses of all steps, the same on every rank."""

    def loss_fn(output: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        return ((output - rows["loss_noise"]) ** 2).mean((1, 2)).sum(), len(output)

    torch.manual_seed(0)
    model = parallelize(Denoiser().double(), setup_process_group_manager(**sizes))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(8):
        cut = shard_global_batch(batch(step), 2, model=model)
        loss = train_step(model, cut, loss_fn=loss_fn)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for sizes in ({}, {"pp_size": 2, "dp_size": 2}, {"dp_size": 4}):
        print(*sizes, *(f"{x:.8f}" for x in launch(train, 4 if sizes else 1, sizes)[0]))
