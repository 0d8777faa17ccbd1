"""A plan to complete, written for a model that has none: its linear layers, block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from torch import fx, nn

from ...pg_manager.building import matching
from ..layers.alike import computes_as_linear
from .attention import has_heads, out_features

OPEN = "replicate"  # the style of a layer that is left to the reader

_POINTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout")

_HEAD = """\
{name} has no plan. These are its layers, as each block calls them. Those with a ? are whole on
every rank: give them "column" if they make heads or inner features (queries, keys, values, gate,
up), "row" if they take these (output, down), "column_gather" for a head, and add "vocab" for an
embedding of tokens. Then pass this as plan="""


class _Line(NamedTuple):
    """Layers of one pattern."""

    pattern: str
    style: str
    shape: str
    decided: bool


def skeleton(model: nn.Module) -> str:
    """Return a plan of the linear layers of a model, as a text that is a Python dict.

    Layers in several blocks are one pattern if they are of one shape. The styles of an MLP are
    proposed, and that of torch's attention; the rest are whole.

    Args:
        model: The plain model.
    """
    blocks: dict[str, dict[str, None]] = {}
    for block, lines in _blocks(model).items():
        text = f"    # {block or type(model).__name__}"
        blocks.setdefault(text, {}).update(dict.fromkeys(map(_written, lines)))
    body = "\n".join("\n".join((text, *lines)) for text, lines in blocks.items())
    head = "\n".join(f"# {line}" for line in _HEAD.format(name=type(model).__name__).splitlines())
    return f"{head}\n{{\n{body}\n}}"


def _written(line: _Line) -> str:
    entry = f'    "{line.pattern}": "{line.style}",'
    return f"{entry}  # {line.shape}{'' if line.decided else '?'}"


def _blocks(model: nn.Module) -> dict[str, list[_Line]]:
    """Return the layers of each module that has some, by its pattern."""
    modules = dict(model.named_modules())
    told: dict[str, tuple[str | None, str]] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            for own, style in _styles(name, module).items():
                place = f"{name}.{own}".lstrip(".")
                told[place] = style, _shape(modules[place])
    blocks: dict[str, list[_Line]] = {}
    for name, (style, shape) in told.items():
        pattern = _pattern(name, told, modules)
        line = _Line(pattern, style or OPEN, shape, style is not None)
        blocks.setdefault(pattern.rpartition(".")[0], []).append(line)
    return blocks


def _pattern(name: str, told: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> str:
    """Return the name with `*` for numbers, if all layers of that pattern are equal."""
    pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
    alike = all(told.get(each) == told[name] for each in matching(pattern, modules))
    return pattern if alike else name


def _styles(name: str, block: nn.Module) -> dict[str, str | None]:
    """Return the layers that a block holds, as it calls them, with the styles that this decides.

    Layers one after another make what the one behind them takes: they are columns, and it is a row.
    Nothing that has parameters lies between, and the block is no attention, whose heads need more.
    What the row makes is as wide as what the columns take, or the block is a sequence.
    """
    held = {n: m for n, m in block.named_children() if any(True for _ in m.parameters())}
    called = [n for n in dict.fromkeys((*_called(block), *held)) if n in held]
    layers = {n: held[n] for n in called if _is_layer(held[n])}
    styles = {n: "attention" if _attends(m) else None for n, m in layers.items()}
    kind = f"{name.rpartition('.')[2]} {type(block).__name__}".lower()
    if has_heads(block) or "attn" in kind or "attention" in kind:
        return styles
    for place, own in enumerate(called):
        inner, hidden = _ends(held[own])
        if isinstance(block, nn.Sequential):
            styles |= _paired(block, place and called[place - 1], own, styles)
            continue
        makes = {n for n in called[:place] if _ends(held[n]) == (hidden, inner) != (inner, hidden)}
        columns = [*takewhile(makes.__contains__, reversed(called[:place]))]
        if columns and styles.get(own, "") is None:
            styles |= {**dict.fromkeys(columns, "column"), own: "row"}
    return styles


def _paired(
    block: nn.Sequential, before: Any, own: str, styles: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return the styles of a layer and of the one before it, if they are the two of an MLP."""
    if not before or {styles.get(before, ""), styles.get(own, "")} != {None}:
        return {}
    names = [*block._modules]
    between = [block.get_submodule(n) for n in names[names.index(before) + 1 : names.index(own)]]
    pointwise = all(type(each).__module__ in _POINTWISE for each in between)
    mixing = any("max" in type(each).__name__ or isinstance(each, nn.GLU) for each in between)
    return {before: "column", own: "row"} if pointwise and not mixing else {}


def _is_layer(module: nn.Module) -> bool:
    return computes_as_linear(module) or out_features(module) > 0 or _attends(module)


def _attends(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


class _Tracer(fx.Tracer):
    """Traces one module, and none of those within it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return that a module is not to be traced."""
        return True


def _called(block: nn.Module) -> Iterator[str]:
    """Yield the children of a block as its forward calls them; none if that cannot be traced."""
    try:
        nodes = [*_Tracer().trace(block).nodes]
    except Exception:  # a forward may do anything
        return
    yield from (str(node.target) for node in nodes if node.op == "call_module")


def _ends(layer: nn.Module) -> tuple[int, int]:
    """Return how many features a linear layer takes, and how many it makes; 0 of another."""
    taken = getattr(layer, "in_features", 0) or getattr(layer, "nx", 0)
    return int(taken or 0), out_features(layer)


def _shape(layer: nn.Module) -> str:
    if _attends(layer):
        return f"{vars(layer)['num_heads']} heads of {vars(layer)['head_dim']}"
    return "{} -> {}".format(*_ends(layer))
