"""All places of a source file that can be changed, each with its replacements.

Positions are bytes of the file. A change never adds or removes a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import scope
from .operators import ARITHMETIC, COMPARISONS, LOGIC, other_constants

Lines = tuple[int, int]  # first and last line; a test that runs one of them reaches the place
AT_IMPORT: Lines = (0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """One place.

    Attributes:
        file: Path below the tree.
        line: Line number.
        kind: Comparison, arithmetic, constant, call or condition.
        start: First byte.
        end: Byte after the last one.
        before: Text of the place.
        choices: Texts that may replace it.
        lines: Lines of the statement around it; (0, 0) for code that runs at import.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    choices: tuple[str, ...]
    lines: Lines


def places(file: str, source: bytes) -> list[Place]:
    """Return the places of a file in order."""
    found = _Finder(file, source).body(ast.parse(source).body, False)
    return sorted(found, key=lambda place: (place.start, place.end))


def changed(source: bytes, place: Place, after: str) -> bytes:
    """Return the source with the place changed; line numbers stay."""
    return source[: place.start] + after.encode() + source[place.end :]


class _Finder:
    """The source of one file, and the walk over its syntax tree."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def place(
        self, kind: str, span: tuple[int, int], choices: tuple[str, ...], lines: Lines
    ) -> Place:
        start, end = span
        line = self.source.count(b"\n", 0, start) + 1
        return Place(
            self.file, line, kind, start, end, self.source[start:end].decode(), choices, lines
        )

    def body(self, statements: list[ast.stmt], in_function: bool) -> Iterator[Place]:
        for statement in statements:
            yield from self.statement(statement, in_function)

    def statement(self, node: ast.stmt, in_function: bool) -> Iterator[Place]:
        """Yield the places of a statement and of statements inside it."""
        match node:
            case ast.Raise() | ast.Import() | ast.ImportFrom():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                lines = (node.lineno, node.body[0].lineno - 1) if in_function else AT_IMPORT
                for default in defaults:
                    yield from self.expression(default, lines)
                if node.name not in scope.FUNCTIONS_LEFT_OUT:
                    yield from self.body(node.body, True)
                return
            case ast.ClassDef():
                yield from self.body(node.body, in_function)
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
        lines = self.header(node) if in_function else AT_IMPORT
        yield from self.own(node, lines)
        for field, value in ast.iter_fields(node):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                yield from self.child(child, lines, in_function)

    def child(self, node: object, lines: Lines, in_function: bool) -> Iterator[Place]:
        """Yield the places of a statement's child: a statement or an expression."""
        if isinstance(node, ast.stmt):
            yield from self.statement(node, in_function)
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            guard = getattr(node, "guard", None)
            if guard is not None:
                yield from self.expression(guard, lines)
            yield from self.body(node.body, in_function)
        elif isinstance(node, ast.withitem):
            yield from self.expression(node.context_expr, lines)
        elif isinstance(node, ast.expr):
            yield from self.expression(node, lines)

    def header(self, node: ast.stmt) -> Lines:
        """Return the lines of a statement without those of statements inside it."""
        below = [getattr(node, "body", []), getattr(node, "cases", [])]
        first = next((part[0] for part in below if part), None)
        if first is None:
            return node.lineno, node.end_lineno or node.lineno
        line = first.lineno if isinstance(first, ast.stmt) else first.pattern.lineno
        return node.lineno, max(node.lineno, line - 1)

    def own(self, node: ast.stmt, lines: Lines) -> Iterator[Place]:
        """Yield the places of the statement itself."""
        match node:
            case ast.Expr(value=ast.Call()):
                start, end = self.span(node)
                lost = self.source.count(b"\n", start, end)
                yield self.place("call", (start, end), ("pass" + "\n" * lost,), lines)
            case ast.AugAssign() if type(node.op) in ARITHMETIC:
                text, choices = ARITHMETIC[type(node.op)]
                gap = self.span(node.target)[1], self.span(node.value)[0]
                together = tuple(f"{choice}=" for choice in choices)
                yield from self.between("arithmetic", gap, f"{text}=", together, lines)
            case ast.If() | ast.While() | ast.Assert():
                yield from self.condition(node.test, lines)

    def expression(self, node: ast.expr, lines: Lines) -> Iterator[Place]:
        """Yield the places of an expression and of expressions inside it."""
        if isinstance(node, ast.JoinedStr):
            return
        yield from self.here(node, lines)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self.expression(child, lines)
            elif isinstance(child, ast.keyword):
                yield from self.expression(child.value, lines)
            elif isinstance(child, ast.comprehension):
                for part in (child.target, child.iter, *child.ifs):
                    yield from self.expression(part, lines)
                for part in child.ifs:
                    yield from self.condition(part, lines)
            elif isinstance(child, ast.arguments):  # a lambda's
                for part in (*child.defaults, *filter(None, child.kw_defaults)):
                    yield from self.expression(part, lines)

    def here(self, node: ast.expr, lines: Lines) -> Iterator[Place]:
        """Yield the places of one node."""
        match node:
            case ast.Constant():
                if choices := other_constants(node.value):
                    yield self.place("constant", self.span(node), choices, lines)
            case ast.Compare():
                parts = [node.left, *node.comparators]
                operators = [COMPARISONS[type(op)] for op in node.ops]
                yield from self.joined("comparison", parts, operators, lines)
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                parts = [node.left, node.right]
                yield from self.joined("arithmetic", parts, [ARITHMETIC[type(node.op)]], lines)
            case ast.BoolOp():
                operators = [LOGIC[type(node.op)]] * (len(node.values) - 1)
                yield from self.joined("condition", node.values, operators, lines)
            case ast.UnaryOp():
                yield from self.unary(node, lines)
            case ast.IfExp():
                yield from self.condition(node.test, lines)

    def unary(self, node: ast.UnaryOp, lines: Lines) -> Iterator[Place]:
        """Yield the removal of a sign or a `not`; a constant's sign belongs to the constant."""
        start, end = self.span(node)
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            text = self.source[start + 1 : end].decode()
            yield self.place("arithmetic", (start, end), (text,), lines)
        elif isinstance(node.op, ast.Not):
            text = self.source[start + len("not") : end].decode()
            yield self.place("condition", (start, end), (f"({text.strip()})",), lines)

    def joined(
        self,
        kind: str,
        parts: list[ast.expr],
        operators: list[tuple[str, tuple[str, ...]]],
        lines: Lines,
    ) -> Iterator[Place]:
        """Yield the operators between operands."""
        for left, right, operator in zip(parts, parts[1:], operators, strict=False):
            gap = self.span(left)[1], self.span(right)[0]
            yield from self.between(kind, gap, *operator, lines)

    def condition(self, node: ast.expr, lines: Lines) -> Iterator[Place]:
        """Yield the inverted condition, unless a change of its own operator does the same."""
        if isinstance(node, ast.Compare | ast.Constant | ast.NamedExpr) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return
        span = self.span(node)
        text = self.source[slice(*span)].decode()
        yield self.place("condition", span, (f"(not ({text}))",), lines)

    def between(
        self, kind: str, gap: tuple[int, int], text: str, choices: tuple[str, ...], lines: Lines
    ) -> Iterator[Place]:
        """Yield an operator between two operands, among brackets, line breaks and comments."""
        bare = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[slice(*gap)])
        pattern = rb"\s+".join(re.escape(word).encode() for word in text.split())
        found = re.search(pattern, bare)
        if found is None:
            raise ValueError(f"{self.file}: no {text!r} in {bare!r}")
        span = gap[0] + found.start(), gap[0] + found.end()
        lost = self.source.count(b"\n", *span)
        padded = tuple(choice + "\n" * lost for choice in choices)
        yield self.place(kind, span, padded, lines)
