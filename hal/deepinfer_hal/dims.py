"""Sizes of a card's dims as expressions of its symbolic names: + - * / and parentheses over names and whole numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|([-+*/()]))")

Tree = tuple


class DimExpression:
    """A parsed dim such as "(m+1)*H" or "C*d/32". A division must come out even.

    names: the symbols it needs. Raises ValueError, when made, for a text that is no such expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = _tokenise(text)
        self._tree = self._sum()
        if self._tokens:
            raise ValueError(f"dim expression {text!r}: {self._tokens[0]!r} is unexpected")
        self.names: frozenset[str] = frozenset(_names(self._tree))

    def value(self, sizes: Mapping[str, int]) -> int | None:
        """The size for given names, or None where a division leaves a remainder. KeyError for an unknown name."""
        return _evaluate(self._tree, sizes)

    def _sum(self) -> Tree:
        tree = self._product()
        while self._next_is("+", "-"):
            tree = (self._tokens.pop(0), tree, self._product())
        return tree

    def _product(self) -> Tree:
        tree = self._atom()
        while self._next_is("*", "/"):
            tree = (self._tokens.pop(0), tree, self._atom())
        return tree

    def _atom(self) -> Tree:
        token = self._tokens.pop(0) if self._tokens else ""
        if token == "(":
            tree = self._sum()
            if not self._next_is(")"):
                raise ValueError(f"dim expression {self.text!r}: a ) is missing")
            self._tokens.pop(0)
            return tree
        if token.isdigit():
            return ("number", int(token))
        if token.isidentifier():
            return ("name", token)
        raise ValueError(f"dim expression {self.text!r}: a name or number is missing where {token or 'the end'!r} stands")

    def _next_is(self, *wanted: str) -> bool:
        return bool(self._tokens) and self._tokens[0] in wanted


def _tokenise(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"dim expression {text!r}: {text[position]!r} is no part of one")
        tokens.append(match.group(match.lastindex))
        position = match.end()
    return tokens


def _names(tree: Tree) -> set[str]:
    if tree[0] in ("number", "name"):
        return {tree[1]} if tree[0] == "name" else set()
    return _names(tree[1]) | _names(tree[2])


def _evaluate(tree: Tree, sizes: Mapping[str, int]) -> int | None:
    kind, *rest = tree
    if kind == "number":
        return rest[0]
    if kind == "name":
        return sizes[rest[0]]
    left, right = (_evaluate(part, sizes) for part in rest)
    if left is None or right is None:
        return None
    if kind == "/":
        return left // right if right and left % right == 0 else None
    return left + right if kind == "+" else left - right if kind == "-" else left * right
