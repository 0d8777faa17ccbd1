"""Models to cut into stages: equal layers between an embedding and a cheap head."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.models.llama import Block, LlamaConfig, rotary_tables

VOCABULARY, HEAD_DIM = 64, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A problem.

    Attributes:
        layer: One of `LAYERS`.
        num_layers: Layers of the full model.
        hidden: Hidden size.
        micro_batches: Micro-batches of a step.
        batch: Sequences of a micro-batch.
        length: Tokens of a sequence.
        dtype: One of `DTYPES`.
    """

    layer: str
    num_layers: int
    hidden: int
    micro_batches: int
    batch: int
    length: int
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return a title."""
        return (
            f"{self.num_layers} {self.layer} layers, hidden {self.hidden}, {self.micro_batches} "
            f"micro-batches of {self.batch}x{self.length} tokens, {self.dtype}"
        )


class Transformer(Block):
    """A Llama block with its own rotary tables, so that hidden states are its only input."""

    def __init__(self, size: Size) -> None:
        heads = size.hidden // HEAD_DIM
        super().__init__(
            LlamaConfig(
                hidden_size=size.hidden, intermediate_size=3 * size.hidden, num_heads=heads,
                num_kv_heads=heads,
            )
        )  # fmt: skip
        positions = torch.arange(size.length)[None]
        cos, sin = rotary_tables(positions, HEAD_DIM, 1e4, torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x_BLH: Tensor) -> Tensor:  # type: ignore[override]
        """Return the same shape as `x_BLH`."""
        cos: Any = self.cos
        sin: Any = self.sin
        return super().forward(x_BLH, cos, sin)


class Linear(nn.Linear):
    """An almost minimal layer; it adds its input since torch's "I" refuses views as outputs."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape as `x`."""
        return x + super().forward(x)


class _Slow(torch.autograd.Function):
    """The identity, whose backward sleeps without using a core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A layer that takes time but no core, as if every rank had its own device.

    Forward, the gradient of the input and that of the weight take `SECONDS` each.
    """

    SECONDS = 0.002

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = size
        self.linear = nn.Linear(size.hidden, size.hidden, bias=False)
        self.linear.weight.register_hook(self._work)

    def _work(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a backward of inputs calls this without a gradient
            time.sleep(self.SECONDS)

    def __deepcopy__(self, memo: Any) -> Sleeping:
        """Return a layer with its own hook: copies of tensors lose hooks."""
        twin = Sleeping(self._size)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape as `x`."""
        time.sleep(self.SECONDS)
        slow: Any = _Slow.apply
        x = slow(x, self.SECONDS)
        total: Tensor = x + self.linear(x)
        return total


LAYERS: dict[str, Callable[[Size], nn.Module]] = {
    "transformer": Transformer,
    "linear": Linear,
    "sleeping": Sleeping,
}


class Model(nn.Module):
    """The full model, without any code for pipelines."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(LAYERS[size.layer](size) for _ in range(size.num_layers))
        self.head = nn.Linear(size.hidden, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens [B, L] to logits [B, L, V]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class StagePart(nn.Module):
    """One stage of a `Model`, as users write it for torch's pipelining; names are unchanged.

    Args:
        model: The full model, which is copied.
        stage: Index of the stage.
        num_stages: Stages of all ranks; must divide the layers.
    """

    def __init__(self, model: Model, stage: int, num_stages: int) -> None:
        super().__init__()
        size = len(model.layers) // num_stages
        own = range(stage * size, (stage + 1) * size)
        self.embed = copy.deepcopy(model.embed) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): copy.deepcopy(model.layers[i]) for i in own})
        self.head = copy.deepcopy(model.head) if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or hidden states to hidden states, or to logits on the last stage."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def make(size: Size) -> tuple[Model, list[Batch]]:
    """Return the full model and a step's micro-batches, the same on every rank."""
    torch.manual_seed(0)
    model = Model(size).to(DTYPES[size.dtype])
    shape = size.micro_batches, size.batch, size.length + 1
    tokens = torch.randint(VOCABULARY, shape)
    return model, [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def token_loss(size: Size) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a micro-batch: its sum of token losses over the number of all tokens."""
    count = size.micro_batches * size.batch * size.length

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, labels.flatten(), reduction="sum") / count

    return loss


def accumulate(size: Size, model: nn.Module, batches: list[Batch]) -> Tensor:
    """Run a step in one process, micro-batch by micro-batch; return its loss."""
    loss_fn, total = token_loss(size), torch.zeros(())
    for batch in batches:
        loss = loss_fn(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        total += loss.detach()
    return total
