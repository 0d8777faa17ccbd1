"""The order in which a module's forward calls its children, read from its source.

Most modules are registered in the order of their calls, but some are not: a final norm before the
layers, a norm of embeddings after them. The order found here only decides which stage such modules
go to. If it is wrong, the first forward raises.
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

_DEEPEST = 3  # nested calls of methods that are followed


def calls_around(module: nn.Module, child: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the children that a module's forward calls before a given child, and those after it.

    Children that are called both before and after are in both sets. Children that are not called by
    name are in neither.

    Args:
        module: The module.
        child: Name of the child, such as the list of layers.
    """
    events = _Events(module)
    events.read(type(module).forward)
    found = [(kind, index) for index, (name, kind) in enumerate(events.found) if name == child]
    surest, _ = max(found, default=(Use.MENTION, 0))  # a call is better evidence than a loop
    if surest is Use.MENTION:  # such as `one, two = self.layers`, which does not show the calls
        return frozenset(), frozenset()
    places = [index for kind, index in found if kind == surest]
    calls = [(index, name) for index, (name, kind) in enumerate(events.found) if kind is Use.CALL]
    before = {name for index, name in calls if index < places[-1]}
    after = {name for index, name in calls if index > places[-1]}
    return frozenset(before - {child}), frozenset(after - {child})


class Use(IntEnum):
    """The way a method uses a child; a larger value is better evidence of the call's place."""

    MENTION = 0
    LOOP = 1
    CALL = 2


class _Events(ast.NodeVisitor):
    """The places where a method names children of its module, in the order of execution.

    Attributes:
        found: The name of the child and its use at each place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._depth = 0
        self.found: list[tuple[str, Use]] = []
        self._use = Use.MENTION

    def read(self, method: Callable[..., Any]) -> None:
        """Read a method; if its source is not available, find nothing."""
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
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        name = _own_name(called)  # of a module, or of a list with an item that is called
        if name is None:
            self.visit(node.func)
        elif name in self._module._modules:
            self.found.append((name, Use.CALL))
        elif not hasattr(nn.Module, name) and self._depth < _DEEPEST:
            method = getattr(type(self._module), name, None)
            if inspect.isfunction(method):
                self.read(method)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _own_name(node)
        if name in self._module._modules:
            self.found.append((str(name), self._use))
        self.generic_visit(node)


@functools.lru_cache(maxsize=64)
def _tree(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function's source, or None if it is not available."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:  # inspect.getsource would be slow: it looks at every imported module's file first
        return ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))) if lines else None
    except (SyntaxError, ValueError):
        return None


def _own_name(node: ast.AST) -> str | None:
    """Return `name` if the node is `self.name`, or None."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == "self" else None  # type: ignore[attr-defined]
