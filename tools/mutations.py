"""List small faults that an author could make: every place in a file where a rule applies.

The rules change comparisons, arithmetic and logic to the neighboring kind. They drop signs and ``not``, add
one to numbers and double them, and flip booleans. They replace min by max, any by all and sum by mean,
reverse sorts, omit keywords (None in records), shorten slices, make conditions hold always or never, and
omit statements if no name becomes unbound.

No rule applies to docstrings, strings, f-strings and raised errors (messages), to annotations, to
assertions (they inform the type checker) and to imports.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "src" / "residuum"
SWAPS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
}
for old, new in (
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitOr, ast.BitAnd),
    (ast.And, ast.Or),
):
    SWAPS |= {old: (new,), new: (old,)}
NAMES = {"median": "mean"}
for pair in ("min max", "amin amax", "minimum maximum", "argmin argmax", "any all", "sum mean"):
    a, b = pair.split()
    NAMES |= {a: b, b: a}
SORTS = ("sort", "argsort", "argpartition", "lexsort")
Change = tuple[Any, ast.AST]


@dataclass(frozen=True)
class Mutant:
    """One fault: the bytes from ``start`` to ``end`` of a file become ``text``."""

    file: str
    where: str  # classes and functions around it
    line: int
    before: str
    after: str
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """Return a name that does not depend on other edits of the file."""
        return f"{self.file}, {self.where}: {self.before} -> {self.after}"

    def mutated(self) -> bytes:
        """Return the file with the fault."""
        source = (PACKAGE / self.file).read_bytes()
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(file: str) -> list[Mutant]:
    """Return every mutant of a file. Mutants with the same text in one function are numbered."""
    source = (PACKAGE / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: dict[tuple[int, int, str], Mutant] = {}
    counts: dict[str, int] = {}
    for where, node, new in _below(ast.parse(source), "the module", set()):
        after = ast.unparse(new)
        text = after if isinstance(node, ast.stmt | ast.Slice) else f"({after})"
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        if (start, end, text) not in mutants:
            mutant = Mutant(file, where, node.lineno, ast.unparse(node), after, start, end, text)
            number = counts[mutant.key] = counts.get(mutant.key, 0) + 1
            suffix = "" if number == 1 else f"  ({number}. of its kind)"
            mutants[start, end, text] = _with(mutant, after=after + suffix)
    return list(mutants.values())


def _below(node: ast.AST, where: str, bound: set[str]) -> Iterator[tuple[str, Any, ast.AST]]:
    """Yield (surroundings, node, replacement) of all faults. ``bound`` holds the names bound so far."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        where = node.name if where == "the module" else f"{where}.{node.name}"
        bound = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in ("annotation", "returns"):
                continue
            if isinstance(child, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.stmt) and _can_go(child, bound):
                yield where, child, ast.Pass()
            if not isinstance(child, ast.Raise):
                yield from ((where, *change) for change in _changes(child))
                yield from _below(child, where, bound)


def _can_go(node: ast.stmt, bound: set[str]) -> bool:
    """Return True if no name is unbound without this statement, and add the names that it binds."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        bound_before = names <= bound
        bound |= names
        return bound_before
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def _changes(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for swap in SWAPS[type(op)]:
                    yield node, _with(node, ops=[*ops[:i], swap(), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            for swap in SWAPS.get(type(op), ()):
                yield node, _with(node, op=swap())
        case ast.UnaryOp(operand=operand):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            for number in sorted({value + 1, value * 2 or -1}):
                yield node, ast.Constant(number)
        case ast.IfExp(body=body, orelse=orelse):
            yield node, body
            yield node, orelse
        case ast.If(test=test):
            yield test, ast.Constant(True)
            yield test, ast.Constant(False)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield test, ast.Constant(True)
        case ast.Slice(lower=lower, upper=upper):  # a bound that is a number is changed as one
            if not isinstance(lower, ast.Constant):
                yield node, _with(node, lower=_next(lower) if lower else ast.Constant(1))
            if not isinstance(upper, ast.Constant):
                yield node, _with(node, upper=_next(upper) if upper else ast.Constant(-1))
        case ast.Call():
            yield from _calls(node)


def _calls(call: ast.Call) -> Iterator[Change]:
    func, name = call.func, getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in NAMES:
        field = "attr" if isinstance(func, ast.Attribute) else "id"
        yield func, _with(func, **{field: NAMES[name]})
    for keyword in call.keywords:
        if keyword.arg is None or isinstance(keyword.value, ast.JoinedStr | ast.Constant):
            continue  # constants are messages, or changed as constants
        if name.lstrip("_")[:1].isupper():
            yield keyword.value, ast.Constant(None)
        else:
            yield call, _with(call, keywords=[k for k in call.keywords if k is not keyword])
    if name == "sorted":
        turned = ast.keyword("reverse", ast.Constant(True))
        yield call, _with(call, keywords=[*call.keywords, turned])
    if name in SORTS and call.args:
        first = call.args[0]
        negated = ast.UnaryOp(ast.USub(), first)
        back = _with(first, elts=first.elts[::-1]) if isinstance(first, ast.Tuple) else negated
        yield call, _with(call, args=[back, *call.args[1:]])


def _with(thing: Any, **changes: Any) -> Any:
    new = copy.copy(thing)
    for name, value in changes.items():
        object.__setattr__(new, name, value)
    return new


def _next(bound: ast.expr) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))
