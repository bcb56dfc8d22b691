"""Values in nested tables and lists, as libraries read them. Pure."""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import Any

from supervisor.connect.place import ABSENT, Item, Place, Step, nested


def get(tree: Any, place: Place) -> Any:
    """Return the value at a place, or ABSENT."""
    for step in place:
        if (key := _key(tree, step)) is ABSENT:
            return ABSENT
        tree = tree[key]
    return tree


def put(tree: Any, place: Place, value: Any) -> None:
    """Set a value; tables and lists that lead to it are made."""
    for number, step in enumerate(place):
        key, rest = _key(tree, step), place[number + 1 :]
        if key is ABSENT:
            _add(tree, step, nested(rest, value))
            return
        if not rest:
            tree[key] = value
            return
        tree = tree[key]


def drop(tree: Any, place: Place) -> None:
    """Remove a value that is there."""
    *way, last = place
    parent = get(tree, tuple(way))
    del parent[_key(parent, last)]


def _key(tree: Any, step: Step) -> Any:
    """Return the key or index of a step, or ABSENT; raises TypeError for another kind of value."""
    if isinstance(step, str):
        if not isinstance(tree, MutableMapping):
            raise TypeError(f"{step} stands in no table")
        return step if step in tree else ABSENT
    if not isinstance(tree, MutableSequence):
        raise TypeError(f"{step.value} stands in no list")
    return next((at for at, one in enumerate(tree) if _is(one, step)), ABSENT)


def _is(value: Any, step: Item) -> bool:
    return isinstance(value, MutableMapping) and value.get(step.member) == step.value


def _add(tree: Any, step: Step, value: Any) -> None:
    if isinstance(step, str):
        tree[step] = value
    else:
        tree.append(value)
