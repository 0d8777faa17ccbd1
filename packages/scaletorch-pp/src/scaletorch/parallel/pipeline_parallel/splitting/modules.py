"""The modules of a plain model, by dotted name: before its list of layers, in it, and after it.

Most modules are registered in the order of their calls, but some are not: a final norm before the
layers, a norm of embeddings after them. Their order is read from the source of the forward. If the
inferred order is wrong, the first forward raises.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Sections = tuple[tuple[str, ...], str, tuple[str, ...]]
_DEEPEST = 3  # nested calls of methods that are followed in the source


def is_inside(name: str, module: str) -> bool:
    """Return whether a dotted name is `module` itself or inside it."""
    return name == module or name.startswith(f"{module}.")


def children(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return a module's children by dotted name; a child registered twice has both names."""
    return {prefix + key: child for key, child in module._modules.items() if child is not None}


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or any of its submodules has parameters."""
    return next(module.parameters(), None) is not None


def is_placed(module: nn.Module) -> bool:
    """Return whether a module is placed on one stage by default, instead of on all stages.

    True if it has parameters or is one of torch's own layers (dropout, a norm without weights).
    """
    return has_parameters(module) or is_plain_layer(module)


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own layers, such as a convolution or a norm."""
    own = type(module).__module__.startswith("torch.nn.") and not module._modules
    return own and not isinstance(module, CONTAINERS)


def called_modules(name: str, module: nn.Module) -> Iterator[str]:
    """Yield `name`, or the names inside if the module has no forward, such as a list."""
    inside = children(module, f"{name}.")
    if not inside or module._parameters or type(module).forward is not nn.Module.forward:
        yield name
        return
    for child_name, child in inside.items():
        yield from called_modules(child_name, child)


def siblings_of(model: nn.Module, name: str) -> str:
    """Return the name of the list that holds a module, or the module's own name if none does.

    The modules of a list are taken to have inputs and outputs of the same form.
    """
    parent = name.rpartition(".")[0]
    return parent if isinstance(model.get_submodule(parent), nn.ModuleList) else name


def check_name(model: nn.Module, name: str) -> None:
    """Check that the model has a module of this dotted name."""
    prefix, module = "", model
    for own in name.split("."):
        inside = children(module, prefix)
        if prefix + own not in inside:
            known = ", ".join(inside) or f"no modules in {prefix.rstrip('.')}"
            message = f"Split names {name!r}, which the model does not have; it has {known}"
            raise InvalidArgumentError(message)
        prefix, module = f"{prefix}{own}.", inside[prefix + own]


def forward_takes(model: nn.Module, argument: str) -> bool:
    """Return whether the forward has an argument, looking through `*args, **kwargs` overrides."""
    passing = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    bases: tuple[Any, ...] = type(model).__mro__
    for base in bases:
        if "forward" in vars(base):
            parameters = inspect.signature(base.forward).parameters
            if argument in parameters or not passing <= {p.kind for p in parameters.values()}:
                return argument in parameters
    return False


def parameter_facts(model: nn.Module) -> list[str]:
    """Return a line for each parameter, to compare the models of two ranks."""
    first: dict[nn.Parameter, str] = {}
    facts = []
    for name, p in model.named_parameters(remove_duplicate=False):
        form = f"shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
        owner = first.setdefault(p, name)
        facts.append(f"parameter {name} of {form}" + (f", tied to {owner}" * (owner != name)))
    return facts


def find_sections(model: nn.Module) -> Sections:
    """Return the names before the layers, of the list of layers, and after them.

    The layers are the only outermost `nn.ModuleList` with parameters, or that of the decoder; in a
    model without one, the only `nn.Sequential` of layers of one class.
    Siblings of this list, and of each module around it, are placed if they have parameters or are
    one of torch's own layers: before the layers if the forward calls them before, else after.
    """
    lists = _outermost_lists(model)
    if len(lists) != 1:
        lists = _lists_of_decoder(model, lists)
    if len(lists) != 1:
        raise InvalidArgumentError(
            "cannot tell which modules are the layers: expected one nn.ModuleList with parameters, "
            f"and {type(model).__name__} has {', '.join(lists) or 'none'}; pass "
            "Split(first=(...), layers='...', last=(...)), or Split(points=(...)) with the modules "
            f"that begin the next stages, with names out of {', '.join(children(model))}"
        )
    first, last = _around(model, lists[0])
    return tuple(first), lists[0], tuple(last)


def find_stacks(model: nn.Module) -> list[list[str]]:
    """Return the layers of an encoder and a decoder in order, each with its neighbouring modules.

    The list is empty if the model does not have both stacks side by side (`get_encoder` and
    `get_decoder`, as in models of transformers, and an argument `encoder_hidden_states` of the
    decoder), or if either has none or several lists of layers.
    """
    encoder, decoder = (_named_by(model, name) or "" for name in ("get_encoder", "get_decoder"))
    if not forward_takes(model.get_submodule(decoder), "encoder_hidden_states"):
        return []
    stacks = [
        [name for name in _outermost_lists(model) if is_inside(name, path)]
        for path in (encoder, decoder)
    ]
    side_by_side = encoder != decoder and encoder.rpartition(".")[0] == decoder.rpartition(".")[0]
    if not side_by_side or not encoder or not decoder or any(len(lists) != 1 for lists in stacks):
        return []
    (first, behind), (between, last) = (_around(model, lists[0]) for lists in stacks)
    first = [name for name in first if not is_inside(name, decoder)]
    last = [name for name in last if not is_inside(name, encoder)]
    encoding, decoding = (
        [[name] for name in children(model.get_submodule(lists[0]), f"{lists[0]}.")]
        for lists in stacks
    )
    encoding[0][:0] = first
    encoding[-1] += [name for name in behind if is_inside(name, encoder)]
    decoding[0][:0] = [name for name in between if name not in (*first, encoder)]
    decoding[-1] += [name for name in last if name not in first]
    return encoding + decoding


def _around(model: nn.Module, layers: str) -> tuple[list[str], list[str]]:
    """Return the modules to place before and after a list of layers, at every level around it."""
    path = layers.split(".")
    first: list[str] = []
    last: list[str] = []
    for depth, name in enumerate(path):
        before, after = _siblings(model, path[:depth], name)
        first += before
        last = after + last  # modules of outer levels run after those of inner levels
    return first, last


def _outermost_lists(model: nn.Module) -> list[str]:
    """Return the names of the outermost lists of layers: modules with parameters.

    A list is an `nn.ModuleList` or, if there is none, an `nn.Sequential` of layers of one class.
    """
    named = [(name, m) for name, m in model.named_modules() if name and has_parameters(m)]
    lists = [name for name, m in named if isinstance(m, nn.ModuleList)]
    lists = lists or [name for name, m in named if _is_sequence_of_layers(m)]
    return [name for name in lists if not any(is_inside(name, o) for o in lists if o != name)]


def _is_sequence_of_layers(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return False
    return len({*map(type, module)}) == 1 and any(layer._modules for layer in module)


def _named_by(model: nn.Module, method_name: str) -> str | None:
    """Return the name of the module that a method returns, such as `get_decoder`, if it has it."""
    method = getattr(model, method_name, None)
    found = method() if callable(method) else None
    return next((name for name, module in model.named_modules() if module is found), None)


def _lists_of_decoder(model: nn.Module, lists: list[str]) -> list[str]:
    """Return those of several lists that may be the layers, or all if the model gives no clue.

    If the model has `get_decoder`, as models of transformers do, the layers are in the decoder, at
    a smaller depth than the layers of towers for other inputs. A list of modules without children,
    such as projections, does not hold layers.
    """
    path = _named_by(model, "get_decoder")
    if path is None:
        return lists
    blocks = [
        name
        for name in lists
        if (not path or is_inside(name, path))
        and any(module._modules for module in model.get_submodule(name).children())
    ]
    least = min((name.count(".") for name in blocks), default=0)
    return [name for name in blocks if name.count(".") == least] or lists


def check_sections(model: nn.Module, sections: Sections) -> None:
    """Check that the names fit the model: all modules with trainable parameters, each once."""
    first, layers, last = sections
    names = (*first, layers, *last)
    for name in names:
        check_name(model, name)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if is_inside(name, other) or is_inside(other, name):
                message = f"Split names a module twice: {name!r} and {other!r}; name it once"
                raise InvalidArgumentError(message)
    container = model.get_submodule(layers)
    if not isinstance(container, CONTAINERS):
        raise InvalidArgumentError(
            f"Split(layers={layers!r}) must name an nn.ModuleList, nn.Sequential or "
            f"nn.ModuleDict of layers, and it is a {type(container).__name__}; name the list "
            "that holds the layers, or cut by Split(points=(...))"
        )
    missing = _unnamed(model, names, layers)
    if missing:
        raise InvalidArgumentError(
            f"Split does not name these modules, which have parameters: {', '.join(missing)}; add "
            "each to first or last"
        )


def _siblings(model: nn.Module, path: list[str], name: str) -> tuple[list[str], list[str]]:
    """Return the siblings of a module that its parent's forward calls before it, and after it.

    If the forward's source does not show the order, the order of registration counts.
    """
    prefix = "".join(f"{outer}." for outer in path)
    holder = model.get_submodule(".".join(path))
    earlier, later = _calls_around(holder, name)
    # A dropout may be called both before and after; without parameters it stays on all stages.
    both = earlier & later
    twice = {other for other in both if not has_parameters(holder.get_submodule(other))}
    siblings = list(children(holder))
    before: list[str] = []
    after: list[str] = []
    for index, (other, module) in enumerate(children(holder).items()):
        if other != name and is_placed(module) and other not in twice:
            known = other in earlier - later
            first = known or (other not in later - earlier and index < siblings.index(name))
            (before if first else after).append(prefix + other)
    return before, after


def _unnamed(model: nn.Module, names: tuple[str, ...], layers: str) -> list[str]:
    """Return the modules with trainable parameters outside all named ones."""
    # Modules that enclose the layers may have such parameters. Frozen modules need no name: they
    # stay on every stage, which computes them itself, so code that uses their values works.
    named = model.named_parameters(remove_duplicate=False)
    holders = {name.rpartition(".")[0] for name, parameter in named if parameter.requires_grad}
    return sorted(
        holder
        for holder in holders
        if holder
        and not is_inside(layers, holder)
        and not any(is_inside(holder, name) for name in names)
    )


def _calls_around(module: nn.Module, child: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the children that a module's forward calls before a given child, and those after it.

    Children that are called both before and after are in both sets. Children that are not called by
    name are in neither.
    """
    # The forwards of its class and base classes: each may call the next by `super().forward`.
    kinds = type(module).__mro__
    forwards = iter([_tree(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind)])
    uses = [*_uses(module, next(forwards), forwards, 1)]
    calls = [index for index, use in enumerate(uses) if use == (child, True)]
    loops = [index for index, use in enumerate(uses) if use == (child, False)]
    places = calls or loops  # a call is better evidence than a loop
    if not places:  # such as `one, two = self.layers`, which does not show the calls
        return frozenset(), frozenset()
    before = {name for name, called in uses[: places[-1]] if called}
    after = {name for name, called in uses[places[-1] + 1 :] if called}
    return frozenset(before - {child}), frozenset(after - {child})


def _uses(
    module: nn.Module, node: ast.AST, forwards: Iterator[ast.AST], depth: int
) -> Iterator[tuple[str, bool]]:
    """Yield the children that code calls (True) or loops over (False), in order of evaluation."""
    inside, name = [*ast.iter_child_nodes(node)], ""
    if isinstance(node, ast.For):
        names = map(_own_name, ast.walk(node.iter))
        yield from ((looped, False) for looped in names if looped in module._modules)
    elif isinstance(node, ast.Call):
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        name = _own_name(called)  # of a module, or of a list with an item that is called
        inside = [*node.args, *node.keywords, *([] if name else [node.func])]
        if ast.unparse(node.func) == "super().forward":
            inside.append(next(forwards, ast.Module([], [])))
    for inner in inside:
        yield from _uses(module, inner, forwards, depth)
    if name in module._modules:
        yield name, True
    elif not hasattr(nn.Module, name) and depth < _DEEPEST:
        method = getattr(type(module), name, None)
        if inspect.isfunction(method):
            yield from _uses(module, _tree(method), forwards, depth + 1)


def _tree(method: Callable[..., Any]) -> ast.AST:
    """Return the syntax tree of a method; an empty one if its source is not available."""
    return _tree_of(getattr(inspect.unwrap(method), "__code__", None))


@functools.lru_cache(maxsize=64)
def _tree_of(code: CodeType | None) -> ast.AST:
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :] if code else []
    try:  # inspect.getsource would be slow: it looks at every imported module's file first
        return ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _own_name(node: ast.AST) -> str:
    """Return `name` if the node is `self.name`, or ""."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == "self" else ""  # type: ignore[attr-defined]
