"""Values of JSON files with comments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.clients.journal import drop_json, put_json, read_json
from supervisor.clients.programs import ABSENT

COMMENTED = """\
// Zed settings
{
  "theme": "One", // day
  /* { "a": 1 } */
  "vim": {
    "mode": true,
  },
  "list": [1, "two", {"three": null}], // end
}
"""


def test_values_are_read_past_comments() -> None:
    assert read_json(COMMENTED, ("theme",)) == "One"
    assert read_json(COMMENTED, ("vim", "mode")) is True
    assert read_json(COMMENTED, ("list",)) == [1, "two", {"three": None}]
    assert read_json(COMMENTED, ("vim", "other")) is ABSENT
    assert read_json(COMMENTED, ("theme", "other")) is ABSENT
    assert read_json("", ("theme",)) is ABSENT


def test_a_value_is_replaced_where_it_stands() -> None:
    assert put_json(COMMENTED, ("theme",), "Two") == COMMENTED.replace('"One"', '"Two"')


def test_a_value_is_added_with_the_objects_around_it() -> None:
    text = put_json(COMMENTED, ("agent", "model"), {"a": 1})
    assert text == COMMENTED.replace(
        '{"three": null}],',
        '{"three": null}],\n  "agent": {\n    "model": {\n      "a": 1\n    }\n  },',
    )
    assert drop_json(text, ("agent",)) == COMMENTED


def test_an_object_on_one_line_stays_on_it() -> None:
    assert put_json('{"a": 1}', ("b",), 2) == '{"a": 1, "b": 2}'
    assert drop_json('{"a": 1, "b": 2}', ("b",)) == '{"a": 1}'
    assert drop_json('{"a": 1, "b": 2}', ("a",)) == '{"b": 2}'


@pytest.mark.parametrize("text", ["", "{}", "{\n}\n", " {} ", "{ }"])
def test_an_empty_file_gets_an_object(text: str) -> None:
    made = put_json(text, ("a", "b"), 1)
    assert json.loads(made) == {"a": {"b": 1}}
    assert made.count("\n") >= 4


def test_tabs_stay_tabs() -> None:
    assert (
        put_json('{\n\t"a": 1\n}\n', ("b", "c"), 2)
        == '{\n\t"a": 1,\n\t"b": {\n\t\t"c": 2\n\t}\n}\n'
    )


def test_a_comment_beside_a_removed_value_stays() -> None:
    text = '{\n  "a": 1, // one\n  "b": 2, // two\n  // of c\n  "c": 3\n}\n'
    for name, comments in (("a", "// two"), ("b", "// one"), ("c", "// of c")):
        left = drop_json(text, (name,))
        assert comments in left
        assert read_json(left, (name,)) is ABSENT


@pytest.mark.parametrize(
    "text",
    ["{", '{"a"}', '{"a": }', "{'a': 1}", '{"a": 1} x', '{"a": "\n"}', "[" * 200, '{"a" 1}', "x"],
)
def test_another_text_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d"):
        put_json(text, ("a",), 1)


def test_a_way_through_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="b stands in no object"):
        put_json('{"a": "x"}', ("a", "b"), 1)


names = st.text("abc", min_size=1, max_size=2)
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
trees: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda scalar: st.lists(scalar, max_size=3) | st.dictionaries(names, scalar, max_size=3),
)
objects = st.dictionaries(names, trees, max_size=4)


@given(objects, names, trees, st.sampled_from([None, 1, 2, "\t"]))
def test_added_values_are_there_and_removed_ones_are_not(
    before: dict[str, Any], name: str, value: Any, indent: Any
) -> None:
    text = json.dumps(before, indent=indent)
    added = put_json(text, (name,), value)
    assert json.loads(added) == {**before, name: value}
    removed = json.loads(drop_json(added, (name,)))
    assert removed == {key: entry for key, entry in before.items() if key != name}
    if name not in before and before:
        assert drop_json(added, (name,)) == text
