"""The whole model: embeddings, layers and what is between them, and the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.parallel.pipeline_parallel import Split

from .parts import HIDDEN, MLP, NORMS, Attention, rotary
from .recipe import Recipe

VOCAB, LONGEST = 24, 16


class Layer(nn.Module):
    """Attention and an MLP, with norms and residuals."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.form = recipe["residual"]
        self.attn, self.norm1 = Attention(recipe), NORMS[recipe["norm"]](HIDDEN)
        if recipe["mlp"] != "none":
            self.mlp, self.norm2 = MLP(recipe), NORMS[recipe["norm"]](HIDDEN)
        if self.form == "scaled":
            self.alpha = nn.Parameter(torch.ones(()))
        if self.form == "sandwich":
            self.norm3 = NORMS[recipe["norm"]](HIDDEN)

    def forward(self, x: Tensor, *more: Any) -> Any:
        """Compute."""
        if self.form == "parallel":
            y = self.norm1(x)
            return x + self.attn(y, *more) + (self.mlp(y) if hasattr(self, "mlp") else 0.0)
        x = self._beside(x, self.norm1, lambda y: self.attn(y, *more))
        return self._beside(x, self.norm2, self.mlp) if hasattr(self, "mlp") else x

    def _beside(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Any:
        if self.form == "post":
            return norm(x + f(x))
        y = f(norm(x))
        if self.form == "sandwich":
            y = self.norm3(y)
        if self.form == "scaled":
            y = self.alpha * y
        return y if self.form == "none" else x + y


class Embed(nn.Module):
    """A table that is scaled, or of fewer features and a layer that widens them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        size = 8 if form == "factored" else HIDDEN
        self.table = nn.Embedding(VOCAB, size)
        if form == "factored":
            self.widen = nn.Linear(size, HIDDEN, bias=False)
        if form == "types":
            self.types = nn.Embedding(2, HIDDEN)
        if form == "normed":
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: Tensor) -> Any:
        """Embed."""
        if self.form == "one_hot":
            return F.one_hot(ids, VOCAB).to(self.table.weight) @ self.table.weight
        x = self.table(ids)
        if self.form == "types":
            return x + self.types(ids % 2)
        if self.form == "normed":
            return self.norm(x)
        return self.widen(x) if self.form == "factored" else x * HIDDEN**0.5


class Model(nn.Module):
    """A language model by a recipe."""

    sines: Tensor

    def __init__(self, recipe: Recipe, depth: int) -> None:
        super().__init__()
        self.recipe = recipe
        form = recipe["embed"]
        self.embed = nn.Embedding(VOCAB, HIDDEN) if form == "table" else Embed(form)
        layers = [Layer(recipe) for _ in range(depth)]
        containers: Mapping[str, Callable[[list[Layer]], Any]] = {
            "list": nn.ModuleList,
            "sequential": lambda own: nn.Sequential(*own),
            "dict": lambda own: nn.ModuleDict({str(i): layer for i, layer in enumerate(own)}),
        }
        self.layers = containers[recipe["layers"]](_sharing(recipe["shared"], layers))
        self.norm = NORMS[recipe["norm"]](HIDDEN)
        self._add_head(recipe["head"])
        self._add_root(depth)
        if recipe["shared"] == "head":
            self.head.weight = _table(self.embed).weight

    def _add_head(self, form: str) -> None:
        if form == "deep":
            self.before_head = nn.Linear(HIDDEN, HIDDEN)
        if form != "functional":
            self.head = nn.Linear(HIDDEN, VOCAB, bias=form == "bias")

    def _add_root(self, depth: int) -> None:
        """Add what the root itself has."""
        recipe = self.recipe
        if recipe["positions"] in ("table", "given"):
            self.positions = nn.Embedding(LONGEST, HIDDEN)
        if recipe["positions"] == "slice":
            self.places = nn.Parameter(torch.zeros(LONGEST, HIDDEN))
        if recipe["positions"] == "sinusoid":
            angles = torch.arange(LONGEST)[:, None] * 100.0 ** -torch.arange(0, 1, 2 / HIDDEN)
            self.register_buffer("sines", torch.cat((angles.sin(), angles.cos()), -1))
        if recipe["temperature"] == "root":
            self.temperature = nn.Parameter(torch.ones(()))
        shapes = {"gain": (HIDDEN,), "weighted": (depth + 1, 1, 1, 1)}
        if recipe["between"] in shapes:
            self.gain = nn.Parameter(torch.ones(shapes[recipe["between"]]))
        if recipe["between"] == "dense":
            self.dense = nn.Linear(HIDDEN, HIDDEN)
        if recipe["between"] == "conv":
            self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)
        if recipe["behind"] in ("scale", "bias"):
            shape = () if recipe["behind"] == "scale" else (VOCAB,)
            self.behind = nn.Parameter(torch.ones(shape))
        if recipe["behind"] == "norm":
            self.behind_norm = nn.LayerNorm(VOCAB)

    def _embedded(self, ids: Tensor, position_ids: Tensor | None) -> Any:
        x, form = self.embed(ids), self.recipe["positions"]
        if form in ("table", "given"):
            if position_ids is None:
                position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
            return x + self.positions(position_ids)
        if form == "slice":
            return x + self.places[: x.shape[1]]
        return x + self.sines[: x.shape[1]] if form == "sinusoid" else x

    def _more(self, ids: Tensor, position_ids: Tensor | None) -> list[Any]:
        """Return what layers are given beside hidden states."""
        angles = None
        if self.recipe["positions"] == "rotary":
            if position_ids is None:
                position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
            length: int = next(iter(self._each())).attn.head_dim
            angles = rotary(position_ids, length)
        temperature = getattr(self, "temperature", None)
        return [] if angles is None and temperature is None else [angles, temperature]

    def _each(self) -> list[Any]:
        own = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        twice = 2 if self.recipe["shared"] == "twice" else 1
        loops = 2 if self.recipe["shared"] == "looped" else 1
        return [layer for layer in own for _ in range(twice)] * loops

    def _through(self, x: Tensor, more: list[Any]) -> Tensor:
        """Call the layers."""
        form, layers = self.recipe["between"], self._each()
        if isinstance(self.layers, nn.Sequential) and form == "none" and not more:
            for _ in range(len(layers) // len(self.layers)):
                x = self.layers(x)
            return x
        first, kept = x, [x]
        for place, layer in enumerate(layers):
            if place and form in _BETWEEN:
                x = _BETWEEN[form](self, x)
            if form == "skips":
                x = x + 0.5 * first
            if form == "unet" and place >= (len(layers) + 1) // 2:
                x = x + kept[len(layers) - 1 - place]
            x = layer(x, *more)
            kept.append(x)
        if form == "weighted":
            return (torch.stack(kept[: len(self.gain)]) * self.gain).sum(0)
        return x

    def _logits(self, x: Tensor) -> Any:
        form = self.recipe["behind"]
        if self.recipe["head"] == "deep":
            x = F.gelu(self.before_head(x))
        functional = self.recipe["head"] == "functional"
        x = F.linear(x, _table(self.embed).weight) if functional else self.head(x)
        if form == "cap":
            return 5 * (x / 5).tanh()
        if form == "norm":
            return self.behind_norm(x)
        return x if form == "none" else x * self.behind if form == "scale" else x + self.behind

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self._embedded(input_ids, position_ids)
        x = self._through(x, self._more(input_ids, position_ids))
        logits = self._logits(self.norm(x))
        return SimpleNamespace(logits=logits) if self.recipe["output"] == "object" else logits


class Counting(Model):
    """Counts its own positions."""

    def forward(self, input_ids: Tensor) -> Any:
        """Return logits [B, L, V]."""
        return self._forward(input_ids)


class Given(Model):
    """Takes positions, and counts them if it is given none."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """Return logits [B, L, V]."""
        return self._forward(input_ids, position_ids)


# What the root does between layers.
_BETWEEN: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "gain": lambda m, x: x * m.gain,
    "dense": lambda m, x: x + m.dense(x),
    "mean": lambda m, x: x - x.mean(1, keepdim=True),
    "cumsum": lambda m, x: x + x.cumsum(1) / 8,
    "conv": lambda m, x: x + m.conv(F.pad(x.mT, (2, 0))).mT,
}


def _table(embed: nn.Module) -> Any:
    return embed.table if isinstance(embed, Embed) else embed


def _sharing(form: str, layers: list[Layer]) -> list[Layer]:
    """Let the last layer share something with the first."""
    first, last = layers[0], layers[-1]
    if form == "layers":
        return [*layers[:-1], first]
    if form == "mlp":
        last.mlp = first.mlp
    if form == "norm":
        last.norm1 = first.norm1
    if form == "weight":
        last.attn.o.weight = first.attn.o.weight
    return layers


def _frozen(form: str, model: Model) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        found = {
            "embed": name.startswith("embed"),
            "layer": name.startswith("layers.0."),
            "norms": "norm" in name,
            "head": name.startswith("head"),
            "biases": name.endswith("bias"),
        }
        if found.get(form):
            yield parameter


def make(recipe: Recipe, seed: int, depth: int) -> Model:
    """Return a model in float64 whose weights, drawn by the seed, all count."""
    torch.manual_seed(seed)
    model = (Given if recipe["positions"] in ("given", "rotary") else Counting)(recipe, depth)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.3)
            else:
                parameter.add_(noise * 0.2)
    for parameter in _frozen(recipe["frozen"], model):
        parameter.requires_grad_(False)
    return model.train()


def split_of(model: Model) -> Split:
    """Return how a pipeline divides a model whose layers are in no list."""
    names = [name for name, _ in model.named_children()]
    place = names.index("layers")
    return Split(first=tuple(names[:place]), layers="layers", last=tuple(names[place + 1 :]))
