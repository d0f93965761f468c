"""Draw texts of the code for a blind reading: ``python -m experiments.blind_reading SEED``.

A reader who knows nothing else about the project rates 60 docstrings, comments and local names, and 40
messages, as "clear", "second reading" or "unclear". The bar: at least 90% are clear and none is unclear in
the last draw, rated before any text of that draw was changed. ``experiments/results/blind_reading.json`` has
all draws.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
DOCSTRINGS, COMMENTS, NAMES, MESSAGES = 25, 15, 20, 40
MIN_WORDS = 4  # of a message: shorter ones are names of columns and the like
INTERNAL = (
    "ValueError",
    "TypeError",
    "RuntimeError",
    "KeyError",
)  # become a part of another message
SPOKEN = ("message", "progress", "warn", "help", "print", "echo")


def docstrings(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of functions, classes and modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", path.name)
                yield f"docstring of `{name}`:\n{text[:900]}"


def comments(path: Path) -> Iterator[str]:
    """Yield comments with the line of code that they belong to.

    Comment lines that follow one another are one comment. A comment at the end of a line belongs to this
    line. Any other comment belongs to the line below.
    """
    lines = path.read_text().splitlines()
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip().startswith("#"):
            block.append(line)
            continue
        if block:
            yield from _comment("\n".join([*block, line]), block)
            block = []
        yield from _comment(line, _end_comments(line))


def _end_comments(line: str) -> list[str]:
    """Return the comment at the end of a line of code, in a list, [] if there is none."""
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)]
    except (tokenize.TokenError, IndentationError):
        return []
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def _comment(code: str, words: list[str]) -> Iterator[str]:
    """Yield a comment with its code, unless it is short or addressed to a tool."""
    text = " ".join(words)
    if len(text.split()) >= MIN_WORDS and "noqa" not in text:
        yield f"comment in\n    {code.strip()}"


def local_names(tree: ast.AST) -> Iterator[str]:
    """Yield names that functions bind, with the statement that binds them."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield f"name `{node.targets[0].id}` in `{function.name}`:\n    {ast.unparse(node)[:300]}"


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield texts of errors, help and progress."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = getattr(node.exc.func, "id", "")
            texts = [_text(argument) for argument in node.exc.args]
            if any(texts) and kind not in INTERNAL:
                yield f"error message:\n    {' '.join(filter(None, texts))}"
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            yield f"help text:\n    {_text(node.value)}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SPOKEN and node.args:
            yield f"printed line:\n    {_text(node.args[0])}"


def _text(node: ast.expr) -> str:
    """Return the text of a literal, with ... for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(chunk) or "..." for chunk in node.values)
    return ""


def draw(seed: int) -> list[str]:
    """Return 100 texts, drawn by seed.

    Args:
        seed: Of the draw.

    Returns:
        60 docstrings, comments and names, then 40 messages.
    """
    pools: dict[str, list[str]] = {"docstrings": [], "comments": [], "names": [], "messages": []}
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        pools["docstrings"] += docstrings(path, tree)
        pools["comments"] += comments(path)
        pools["names"] += local_names(tree)
        pools["messages"] += [m for m in messages(tree) if len(m.split()) >= 2 + MIN_WORDS]
    generator = random.Random(seed)
    counts = {"docstrings": DOCSTRINGS, "comments": COMMENTS, "names": NAMES, "messages": MESSAGES}
    return [text for name, pool in pools.items() for text in generator.sample(pool, counts[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw 100 texts of the code for a blind reading.")
    parser.add_argument("seed", type=int)
    for number, text in enumerate(draw(parser.parse_args().seed), 1):
        print(f"### {number}\n{text}\n")


if __name__ == "__main__":
    main()
