"""The full model: embeddings, layers and what is between them, and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

# Additional branches: a form's own module, and its function of hidden states.
_OWN: Mapping[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3),
    "gru": lambda: nn.GRU(HIDDEN, HIDDEN, batch_first=True),
    "dense": lambda: nn.Linear(HIDDEN, HIDDEN),
    "ids": lambda: nn.Embedding(VOCAB, HIDDEN),
}
_ASIDE: Mapping[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "conv": lambda m, x, ids: m.own(F.pad(x.mT, (2, 0))).mT,
    "gru": lambda m, x, ids: m.own(x)[0],
    "dense": lambda m, x, ids: m.own(x),
    "ids": lambda m, x, ids: m.own(ids),
    "shift": lambda m, x, ids: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "mean": lambda m, x, ids: -x.mean(1, keepdim=True),
    "cumsum": lambda m, x, ids: x.cumsum(1) / 8,
    "rows": lambda m, x, ids: -x.mean(0),
    "count": lambda m, x, ids: x / m.counted(),
}
# Calls of layers other than as functions.
_CALLS: Mapping[str, Callable[..., Any]] = {
    "forward": lambda layer, *args: layer.forward(*args),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class Aside(nn.Module):
    """A branch that is added to hidden states."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.calls = form, 0
        if form in _OWN:
            self.own = _OWN[form]()

    def counted(self) -> int:
        """Return the number of calls so far."""
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor, ids: Any) -> Tensor:
        """Return hidden states plus half of the branch."""
        return x + 0.5 * _ASIDE[self.form](self, x, ids)


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
        self.inside = Aside(recipe["inside"]) if recipe["inside"] != "none" else None

    def forward(self, x: Tensor, ids: Any = None, *more: Any) -> Any:
        """Return hidden states."""
        if self.inside is not None:
            x = self.inside(x, ids)
        if self.form == "parallel":
            y = self.norm1(x)
            return x + self.attn(y, *more) + (self.mlp(y) if hasattr(self, "mlp") else 0.0)
        x = self._beside(x, self.norm1, lambda y: self.attn(y, *more))
        return self._beside(x, self.norm2, self.mlp) if hasattr(self, "mlp") else x

    def _beside(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Any:
        if self.form == "post":
            return norm(x + f(x))
        y = f(norm(x))
        if self.form == "none":
            return y
        if self.form == "sandwich":
            return x + self.norm3(y)
        return x + (self.alpha * y if self.form == "scaled" else y)


class Halved(Layer):
    """A layer with its own `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return half of the layer's output."""
        return 0.5 * super().__call__(*args, **kwargs)


@dataclass
class Output:
    """Logits [B, L, V]."""

    logits: Tensor


class Model(nn.Module):
    """A language model with a recipe."""

    sines: Tensor
    gain: nn.Parameter
    behind: nn.Parameter

    def __init__(self, recipe: Recipe, depth: int) -> None:
        super().__init__()
        self.recipe = recipe
        self._add_embeddings(recipe["embed"], recipe["positions"])
        kind = Halved if recipe["calls"] == "own_call" else Layer
        containers: Mapping[str, Callable[[list[Any]], Any]] = {
            "list": nn.ModuleList,
            "sequential": lambda own: nn.Sequential(*own),
            "dict": lambda own: nn.ModuleDict({str(i): layer for i, layer in enumerate(own)}),
        }
        layers = _sharing(recipe["shared"], [kind(recipe) for _ in range(depth)])
        self.layers = containers[recipe["layers"]](layers)
        self.norm = NORMS[recipe["norm"]](HIDDEN)
        if recipe["head"] == "deep":
            self.before_head = nn.Linear(HIDDEN, HIDDEN)
        if recipe["head"] != "functional":
            self.head = nn.Linear(HIDDEN, VOCAB, bias=recipe["head"] == "bias")
        if recipe["shared"] == "head":
            self.head.weight = self.embed.weight
        if recipe["between"] in _ASIDE:
            self.between = Aside(recipe["between"])
        if recipe["behind"] == "norm":
            self.behind_norm = nn.LayerNorm(VOCAB)
        for name, form, shape in (
            ("temperature", recipe["temperature"] == "root", ()),
            ("gain", recipe["between"] == "gain", (HIDDEN,)),
            ("gain", recipe["between"] == "weighted", (depth + 1, 1, 1, 1)),
            ("behind", recipe["behind"] == "scale", ()),
            ("behind", recipe["behind"] == "bias", (VOCAB,)),
        ):
            if form:
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def _add_embeddings(self, form: str, positions: str) -> None:
        options: Mapping[str, Any] = {
            "by_frequency": {"scale_grad_by_freq": True},
            "max_norm": {"max_norm": 1.0},
        }
        size = HIDDEN // 2 if form == "factored" else HIDDEN
        self.embed = nn.Embedding(VOCAB, size, **options.get(form, {}))
        if form == "factored":
            self.widen = nn.Linear(size, HIDDEN, bias=False)
        if form == "types":
            self.types = nn.Embedding(2, HIDDEN)
        if form == "normed":
            self.embed_norm = nn.LayerNorm(HIDDEN)
        if positions in ("table", "given"):
            self.positions = nn.Embedding(LONGEST, HIDDEN)
        if positions == "slice":
            self.places = nn.Parameter(torch.zeros(LONGEST, HIDDEN))
        if positions == "sinusoid":
            angles = torch.arange(LONGEST)[:, None] * 100.0 ** -torch.arange(0, 1, 2 / HIDDEN)
            self.register_buffer("sines", torch.cat((angles.sin(), angles.cos()), -1))

    def _embedded(self, ids: Tensor) -> Any:
        form = self.recipe["embed"]
        if form == "one_hot":
            return F.one_hot(ids, VOCAB).to(self.embed.weight) @ self.embed.weight
        x = self.embed(ids)
        if form == "types":
            return x + self.types(ids % 2)
        if form == "normed":
            return self.embed_norm(x)
        return self.widen(x) if form == "factored" else x if form == "table" else 4.0 * x

    def _each(self) -> list[Any]:
        """Return the layers in the order of their calls."""
        own: Any = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        form = self.recipe["shared"]
        return [x for x in own for _ in range(1 + (form == "twice"))] * (1 + (form == "looped"))

    def _through(self, x: Tensor, ids: Tensor, more: list[Any]) -> Tensor:
        """Run the layers."""
        form, layers, call = self.recipe["between"], self._each(), _CALLS.get(self.recipe["calls"])
        if isinstance(self.layers, nn.Sequential) and form == "none" and not more and not call:
            for _ in range(len(layers) // len(self.layers)):
                x = self.layers(x)
            return x
        kept = [x]
        for place, layer in enumerate(layers):
            if place and form in _ASIDE:
                x = self.between(x, ids)
            if place and form == "gain":
                x = x * self.gain
            if form == "skips":
                x = x + 0.5 * kept[0]
            if form == "unet" and place >= (len(layers) + 1) // 2:
                x = x + kept[len(layers) - 1 - place]
            x = call(layer, x, *more) if call else layer(x, *more)
            kept.append(x)
        if form == "weighted":
            return (torch.stack(kept[: len(self.gain)]) * self.gain).sum(0)
        return x

    def _logits(self, x: Tensor) -> Any:
        form, behind = self.recipe["head"], self.recipe["behind"]
        if form == "functional":
            x = F.linear(x, self.embed.weight)
        elif form == "cosine":
            x = F.linear(x, F.normalize(self.head.weight, dim=-1))
        else:
            x = self.head(F.gelu(self.before_head(x)) if form == "deep" else x)
        if behind == "cap":
            return 5 * (x / 5).tanh()
        if behind == "norm":
            return self.behind_norm(x)
        return {"none": lambda: x, "scale": lambda: x * self.behind}.get(
            behind, lambda: x + self.behind
        )()

    def compute(self, ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """Return logits [B, L, V] for ids [B, L], in an object if the recipe says so."""
        x, form, angles = self._embedded(ids), self.recipe["positions"], None
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
        if form in ("table", "given"):
            x = x + self.positions(position_ids)
        if form in ("slice", "sinusoid"):
            x = x + (self.places if form == "slice" else self.sines)[: x.shape[1]]
        if form == "rotary":
            angles = rotary(position_ids, self._each()[0].attn.head_dim)
        temperature = getattr(self, "temperature", None)
        more: list[Any] = [ids] * (self.recipe["inside"] == "ids")
        if angles is not None or temperature is not None:
            more = [ids, angles, temperature]
        logits = self._logits(self.norm(self._through(x, ids, more)))
        kinds: Mapping[str, Callable[..., Any]] = {"object": SimpleNamespace, "dataclass": Output}
        kind = kinds.get(self.recipe["output"])
        return kind(logits=logits) if kind else logits


class Counting(Model):
    """A model that counts its own positions."""

    def forward(self, input_ids: Tensor) -> Any:
        """Return logits."""
        return self.compute(input_ids)


class Given(Model):
    """A model that takes positions, and counts them if there are none."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """Return logits."""
        return self.compute(input_ids, position_ids)


def _sharing(form: str, layers: list[Layer]) -> list[Layer]:
    """Let the last layer share modules or weights with the first."""
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


# Frozen parameters, by a test of their names.
_FROZEN: Mapping[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "embed": lambda name: name.startswith("embed"),
    "layer": lambda name: name.startswith("layers.0."),
    "norms": lambda name: "norm" in name,
    "head": lambda name: name.startswith("head"),
    "biases": lambda name: name.endswith("bias"),
}


def make(recipe: Recipe, seed: int, depth: int) -> Model:
    """Return a model in float64 with random weights of the seed that all matter."""
    torch.manual_seed(seed)
    model = (Given if recipe["positions"] in ("given", "rotary") else Counting)(recipe, depth)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.25)
            else:
                parameter.add_(noise * 0.2)
            parameter.requires_grad_(not _FROZEN[recipe["frozen"]](name))
    if recipe["calls"] == "hook":
        hook_layers(model)
    return model.train()


def hook_layers(model: nn.Module) -> None:
    """Register a hook that scales what layers return."""
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        layer.register_forward_hook(lambda module, args, output: 0.8 * output)


def split_of(model: Model) -> Split:
    """Return the pipeline split of a model whose layers are not in a list."""
    names = [name for name, _ in model.named_children()]
    place = names.index("layers")
    return Split(first=tuple(names[:place]), layers="layers", last=tuple(names[place + 1 :]))
