"""Converts the `groups` and the `matrix` of llama-swap to rules of `[groups]`.

A group there unloads its other members (`swap`), the models of other groups (`exclusive`), or
resists that (`persistent`). A matrix lists the sets of models that may be loaded together, as
expressions of `&`, `|`, parentheses and `+NAME` for another set; here models that no set has
together become groups of which one model may be loaded.

Source: llama-swap, config.example.yaml, internal/router/group.go and internal/matrix/dsl.go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any, Final

from supervisor.errors import SettingsInvalid
from supervisor.settings.groups import GROUP_MAX, Groups, GroupSettings
from supervisor.settings.import_yaml import expand_text, table_or_empty, texts

_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_MAX: Final = 32
_WORD: Final = re.compile(r"[\w.-]+")
_EXPRESSION_MAX: Final = 4096  # characters
_MODELS_MAX: Final = 64  # of a matrix: the pairs grow with the square

_MATRIX_NOTE: Final = (
    "matrix: models that no set has together are kept apart by pairs; sets of three and more are "
    "left to memory, and evict_costs to the measured time of a load"
)

Table = dict[str, Any]
_Pair = frozenset[str]
# Models, and the pairs of them that may be loaded together.
_Expanded = tuple[frozenset[str], frozenset[_Pair]]


def is_pinned(model: str, whole: Mapping[str, Any]) -> bool:
    """Return whether no other model unloads a model: it is persistent, and its group is no swap."""
    return any(
        group.get("persistent") and not _swaps(group) and model in texts(group.get("members"))
        for group in _groups(whole).values()
    )


def convert(
    whole: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Return tables of `[groups]`, and notes; `names` are the models here, by their name there.

    Raises SettingsInvalid: an expression of the matrix cannot be read.
    """
    settings = table_or_empty(whole, "routing", "router", "settings")
    sets = table_or_empty(whole, "matrix") or table_or_empty(settings, "matrix")
    use = table_or_empty(whole, "routing", "router").get("use")
    if sets.get("sets") and use != "group":
        return _matrix_groups(sets, names)
    groups, notes = dict[str, Table](), list[str]()
    pinned = frozenset(here for there, here in names.items() if is_pinned(there, whole))
    for name, group in _groups(whole).items():
        members = [names[member] for member in texts(group.get("members")) if member in names]
        table = _group(list(dict.fromkeys(members)), group, names.values(), pinned)
        if table is None:
            continue
        if len(table["models"]) > GROUP_MAX:
            notes.append(f"groups.{name} is left out: it has more than {GROUP_MAX} models")
            continue
        contradicting = Groups({"": GroupSettings(**table)}, pinned).contradictions(names.values())
        if rule := next(contradicting, None):
            notes.append(f"groups.{name} is left out: {rule.clause}")
        else:
            groups[_group_name(name, groups)] = table
    grouped = {
        member for group in _groups(whole).values() for member in texts(group.get("members"))
    }
    if groups and not grouped >= names.keys():
        notes.append("groups: a model in no group is loaded beside others while memory has room")
    return groups, tuple(notes)


def _groups(whole: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    nested = table_or_empty(whole, "routing", "router", "settings", "groups")
    both = {**table_or_empty(whole, "groups"), **nested}
    return {name: table_or_empty(group) for name, group in both.items()}


def _swaps(group: Mapping[str, Any]) -> bool:
    return group.get("swap", True) is not False and len(set(texts(group.get("members")))) > 1


def _group(
    members: list[str], group: Mapping[str, Any], models: Iterable[str], pinned: frozenset[str]
) -> Table | None:
    """Return the table of a group, or None if it has no rule here."""
    rules: Table = {}
    if len(members) > 1:
        rules = {"max_loaded": 1} if _swaps(group) else {"together": True}
    others = {*models} - {*members} - pinned
    if members and others and group.get("exclusive", True) is not False:
        rules["exclusive"] = True
    return {"models": members, **rules} if rules else None


def _group_name(name: str, taken: Iterable[str]) -> str:
    base = _NAME.sub("-", name).strip("._-")[:_NAME_MAX] or "group"
    numbered = (f"{base[: _NAME_MAX - 4]}-{number}" for number in range(2, 1000))
    return next(name for name in (base, *numbered) if name not in taken)


def _matrix_groups(
    matrix: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Table], tuple[str, ...]]:
    if len(names) > _MODELS_MAX:
        return {}, (f"matrix: it is left out, as there are more than {_MODELS_MAX} models",)
    sets = _Sets(matrix)
    expanded = [sets.expand(name) for name in sets.expressions]
    members = frozenset[str]().union(*(models for models, _ in expanded))
    allowed = frozenset[_Pair]().union(*(pairs for _, pairs in expanded))
    apart = {
        frozenset((names[name], names[other]))
        for name, other in combinations(sorted(members & names.keys()), 2)
        if frozenset((name, other)) not in allowed
    }
    models = list(dict.fromkeys(names.values()))
    groups: dict[str, Table] = {
        f"matrix-{number}": {"models": clique, "max_loaded": 1}
        for number, clique in enumerate(_cliques(models, apart), 1)
    }
    inside = {here for there, here in names.items() if there in members}
    if alone := [model for model in models if model not in inside]:
        rules = {"max_loaded": 1} if len(alone) > 1 else {}
        groups["matrix-alone"] = {"models": alone, "exclusive": True, **rules}
    return groups, (_MATRIX_NOTE,)


def _cliques(models: list[str], apart: set[_Pair]) -> Iterator[list[str]]:
    """Yield groups of models that are all apart from each other, until each pair is in one."""
    left = set(apart)
    for pair in combinations(models, 2):
        if frozenset(pair) in left:
            clique = [*pair]
            for model in models:
                if all(frozenset((model, other)) in apart for other in clique):
                    clique.append(model)
            left -= {frozenset(covered) for covered in combinations(clique, 2)}
            yield [model for model in models if model in clique]


class _Sets:
    def __init__(self, matrix: Mapping[str, Any]) -> None:
        self.expressions = table_or_empty(matrix, "sets")
        variables = table_or_empty(matrix, "vars")
        self._variables = {name: expand_text(model) for name, model in variables.items()}
        self._expanded: dict[str, _Expanded | None] = {}  # None: it is being expanded

    def expand(self, name: str) -> _Expanded:
        """Return the models of a set, and the pairs of them that may be loaded together.

        Raises SettingsInvalid: it is no expression, or it refers to itself.
        """
        if name not in self._expanded:
            self._expanded[name] = None
            self._expanded[name] = self._evaluate(name)
        found = self._expanded[name]
        if found is None:
            raise SettingsInvalid(f"matrix.sets.{name} refers to itself")
        return found

    def _evaluate(self, name: str) -> _Expanded:
        text = expand_text(self.expressions.get(name))[: _EXPRESSION_MAX + 1]
        words = list(dict.fromkeys(_WORD.findall(text)))
        # As an expression of Python, whose operators bind in the same order.
        coded = _WORD.sub(lambda found: f"w{words.index(found[0])}", text).strip()

        def visit(node: ast.AST) -> _Expanded:
            match node:
                case ast.Name(id=code):
                    word = words[int(code[1:])]
                    return frozenset({self._variables.get(word, word)}), frozenset()
                case ast.UnaryOp(op=ast.UAdd(), operand=ast.Name(id=code)):
                    return self.expand(words[int(code[1:])])
                case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as operator, right=right):
                    (first, pairs), (second, more) = visit(left), visit(right)
                    both = product(first, second) if isinstance(operator, ast.BitAnd) else ()
                    return first | second, pairs | more | {frozenset(pair) for pair in both}
            raise SyntaxError

        try:
            is_short = len(text) <= _EXPRESSION_MAX
            return visit(ast.parse(coded if is_short else "", mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SettingsInvalid(
                f"matrix.sets.{name} is not an expression of models, &, |, () and +SET"
            ) from error
