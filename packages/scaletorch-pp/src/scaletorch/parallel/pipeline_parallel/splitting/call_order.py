"""In which order a module's forward calls its children, as its source tells.

Modules are mostly registered in the order in which they are called, and some are not: a final norm
before the layers, a norm of embeddings behind them. What is read here decides only which stage gets
such a module; if it is wrong, the first forward refuses it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from enum import IntEnum
from types import CodeType
from typing import Any

from torch import nn

_DEEPEST = 3  # methods that call methods


def calls_around(module: nn.Module, child: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return which children a forward calls before it comes to one of them, and which after it.

    Those that are called on both sides, or not by name, are in neither.

    Args:
        module: Whose forward.
        child: Name of the child, such as the list of layers.
    """
    before, after = _calls(module, child)
    return before - after - {child}, after - before - {child}


def calls_on_both_sides(module: nn.Module, child: str) -> frozenset[str]:
    """Return which children a forward calls both before it comes to one of them and after it."""
    before, after = _calls(module, child)
    return (before & after) - {child}


def _calls(module: nn.Module, child: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return all children that a forward calls before one of them, and all after it."""
    events = _Events(module)
    events.read(type(module).forward)
    found = [(kind, index) for index, (name, kind) in enumerate(events.found) if name == child]
    surest, _ = max(found, default=(Use.MENTION, 0))  # a call says more than a loop
    if surest is Use.MENTION:  # such as `one, two = self.layers`: when they run is not told
        return frozenset(), frozenset()
    places = [index for kind, index in found if kind == surest]
    calls = [(index, name) for index, (name, kind) in enumerate(events.found) if kind is Use.CALL]
    before = {name for index, name in calls if index < places[-1]}
    after = {name for index, name in calls if index > places[-1]}
    return frozenset(before), frozenset(after)


def called_by_index(module: nn.Module) -> list[str]:
    """Return the lists of which a forward calls one module at a time, as `self.norms[i](x)`.

    They come in the order of the first call.
    """
    events = _Events(module)
    events.read(type(module).forward)
    lists = {name for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}
    return list(dict.fromkeys(n for n, use in events.found if use is Use.CALL and n in lists))


def may_come_back(module: nn.Module, child: str) -> bool:
    """Return whether a forward may call a child, or modules of a child that is a list, twice.

    So it is of a loop over a list in another loop, of several loops over it, and of a call of
    another child in a loop. What runs is not told: a loop may end, or begin, where another did.
    """
    events = _Events(module)
    events.read(type(module).forward)
    found = [
        (use, loops)
        for (name, use), loops in zip(events.found, events.loops, strict=True)
        if name == child and use is not Use.MENTION
    ]
    if not isinstance(module._modules[child], nn.ModuleList):
        return any(use is Use.CALL and loops > 0 for use, loops in found)
    several = sum(use is Use.LOOP for use, _ in found) > 1
    return several or any(loops > (use is Use.CALL) for use, loops in found)


def loop_around(model: nn.Module, layers: str) -> str | None:
    """Return the outermost module down to a list that a forward may come back to, or None."""
    path = layers.split(".")
    for depth, child in enumerate(path):
        if may_come_back(model.get_submodule(".".join(path[:depth])), child):
            return ".".join(path[: depth + 1])
    return None


class Use(IntEnum):
    """What a method does with a child that it names."""

    MENTION = 0
    LOOP = 1
    CALL = 2


class _Events(ast.NodeVisitor):
    """Where a method names children of its module, in the order in which it runs.

    Attributes:
        found: Name of a child, and what is done with it there.
        loops: In how many loops that is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._depth = 0
        self._loops = 0
        self.found: list[tuple[str, Use]] = []
        self.loops: list[int] = []
        self._use = Use.MENTION

    def read(self, method: Callable[..., Any]) -> None:
        """Read a method; nothing is found if its source is not to be had."""
        code = getattr(inspect.unwrap(method), "__code__", None)
        tree = None if code is None else _tree(code)
        if tree is None:
            return
        self._depth += 1
        self.visit(tree)
        self._depth -= 1

    def visit_For(self, node: ast.For) -> None:
        self._use = Use.LOOP
        self.visit(node.iter)
        self._use = Use.MENTION
        self._visit_body(node)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._visit_body(node)

    def _visit_body(self, node: ast.For | ast.While) -> None:
        self._loops += 1
        for statement in node.body:
            self.visit(statement)
        self._loops -= 1
        for statement in node.orelse:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        name = _own_name(called)  # of a module, or of a list of which one is called
        if name is None:
            self.visit(node.func)
        elif name in self._module._modules:
            self._note(name, Use.CALL)
        elif not hasattr(nn.Module, name) and self._depth < _DEEPEST:
            method = getattr(type(self._module), name, None)
            if inspect.isfunction(method):
                self.read(method)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _own_name(node)
        if name in self._module._modules:
            self._note(str(name), self._use)
        self.generic_visit(node)

    def _note(self, name: str, use: Use) -> None:
        self.found.append((name, use))
        self.loops.append(self._loops)


@functools.lru_cache(maxsize=64)
def _tree(code: CodeType) -> ast.AST | None:
    """Return what a function's source says, which each of several questions is asked of."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:  # not by inspect.getsource, which first asks every imported module for its file
        return ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))) if lines else None
    except (SyntaxError, ValueError):
        return None


def _own_name(node: ast.AST) -> str | None:
    """Return `name` of `self.name`, or None."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == "self" else None  # type: ignore[attr-defined]
