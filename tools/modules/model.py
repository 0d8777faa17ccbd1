"""The whole model: embeddings, layers and what is between them, and the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scaletorch.parallel.pipeline_parallel import Split

from .parts import HIDDEN, MLP, NORMS, Attention, rotary
from .recipe import Recipe

VOCAB, LONGEST = 24, 16


class Inside(nn.Module):
    """Something on the hidden states beside attention and MLP."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.calls = form, 0
        if form == "conv":
            self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)
        if form == "gru":
            self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        if form == "ids":
            self.table = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        """Compute."""
        self.calls += 1
        if self.form == "shift":
            return F.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.form == "conv":
            return self.conv(F.pad(x.mT, (2, 0))).mT
        if self.form == "gru":
            return self.gru(x)[0]
        if self.form == "ids":
            return self.table(ids)
        return x / self.calls if self.form == "count" else x.mean(1, keepdim=True)


@dataclass
class Output:
    """Logits [B, L, V]."""

    logits: Tensor


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
        if recipe["inside"] != "none":
            self.inside = Inside(recipe["inside"])

    def forward(self, x: Tensor, ids: Any = None, *more: Any) -> Any:
        """Compute."""
        if hasattr(self, "inside"):
            x = x + 0.5 * self.inside(x, ids)
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


class Halved(Layer):
    """A layer with a `__call__` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and halve what comes out."""
        return 0.5 * super().__call__(*args, **kwargs)


class Embed(nn.Module):
    """A table that is scaled, or of fewer features and a layer that widens them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        size = 8 if form == "factored" else HIDDEN
        options: Mapping[str, Any] = {
            "by_frequency": {"scale_grad_by_freq": True},
            "max_norm": {"max_norm": 1.0},
        }
        self.table = nn.Embedding(VOCAB, size, **options.get(form, {}))
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
        kind = Halved if recipe["calls"] == "own_call" else Layer
        layers = [kind(recipe) for _ in range(depth)]
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
        if angles is not None or temperature is not None:
            return [ids, angles, temperature]
        return [ids] if self.recipe["inside"] == "ids" else []

    def _each(self) -> list[Any]:
        own = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        twice = 2 if self.recipe["shared"] == "twice" else 1
        loops = 2 if self.recipe["shared"] == "looped" else 1
        return [layer for layer in own for _ in range(twice)] * loops

    def _through(self, x: Tensor, more: list[Any]) -> Tensor:
        """Call the layers."""
        form, layers = self.recipe["between"], self._each()
        plain = self.recipe["calls"] in ("call", "own_call", "hook", "late_hook")
        if isinstance(self.layers, nn.Sequential) and form == "none" and not more and plain:
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
            x = layer(x, *more) if plain else _CALLS[self.recipe["calls"]](layer, x, *more)
            kept.append(x)
        if form == "weighted":
            return (torch.stack(kept[: len(self.gain)]) * self.gain).sum(0)
        return x

    def _logits(self, x: Tensor) -> Any:
        form = self.recipe["behind"]
        if self.recipe["head"] == "deep":
            x = F.gelu(self.before_head(x))
        if self.recipe["head"] == "functional":
            x = F.linear(x, _table(self.embed).weight)
        elif self.recipe["head"] == "cosine":
            x = F.linear(x, F.normalize(self.head.weight, dim=-1))
        else:
            x = self.head(x)
        if form == "cap":
            return 5 * (x / 5).tanh()
        if form == "norm":
            return self.behind_norm(x)
        return x if form == "none" else x * self.behind if form == "scale" else x + self.behind

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self._embedded(input_ids, position_ids)
        x = self._through(x, self._more(input_ids, position_ids))
        logits = self._logits(self.norm(x))
        kinds: Mapping[str, Callable[..., Any]] = {"object": SimpleNamespace, "dataclass": Output}
        kind = kinds.get(self.recipe["output"])
        return kind(logits=logits) if kind else logits


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
    "rows": lambda m, x: x - x.mean(0),
}


_CALLS: Mapping[str, Callable[..., Any]] = {
    "forward": lambda layer, *args: layer.forward(*args),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
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
    if form == "qk":
        first.attn.k = first.attn.q
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
    if recipe["calls"] == "hook":
        hook_layers(model)
    return model.train()


def hook_layers(model: nn.Module) -> None:
    """Let a hook scale what layers return."""
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        layer.register_forward_hook(lambda module, args, output: 0.8 * output)


def split_of(model: Model) -> Split:
    """Return how a pipeline divides a model whose layers are in no list."""
    names = [name for name, _ in model.named_children()]
    place = names.index("layers")
    return Split(first=tuple(names[:place]), layers="layers", last=tuple(names[place + 1 :]))
