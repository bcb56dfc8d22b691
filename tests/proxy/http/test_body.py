"""The values of a JSON text, counted before it is parsed."""

import functools
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.growth import FACTOR, is_linear

from proxy.errors import BodyTooComplex
from proxy.http.body import count_values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{},:aé\n', max_size=20),
    lambda some: st.lists(some, max_size=5) | st.dictionaries(st.text('"\\[a', max_size=5), some),
    max_leaves=40,
)


def counted(said: object) -> int:
    match said:
        case dict():
            return 8 + (2 * len(said) + sum(map(counted, said.values())) or 1)
        case list():
            return 8 + (sum(map(counted, said)) or 1)
    return 1


def depth(said: object) -> int:
    inner = said.values() if isinstance(said, dict) else said if isinstance(said, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(said=JSON, piece=st.integers(1, 9), is_ascii=st.booleans())
def test_the_count_and_the_depth_are_exact_wherever_the_pieces_end(
    said: object, piece: int, *, is_ascii: bool
) -> None:
    body = json.dumps(said, ensure_ascii=is_ascii).encode()
    body += b" " * piece  # more than a piece
    count = functools.partial(count_values, body, piece_bytes=piece)
    found = count(10**9, 10**9)
    assert found == counted(said)
    assert count_values(body, found, depth(said)) >= found
    if depth(said):
        with pytest.raises(BodyTooComplex, match="max_body_depth"):
            count(10**9, depth(said) - 1)
    if found > 1:
        with pytest.raises(BodyTooComplex, match="max_body_values"):
            count(found - 1, 10**9)


def test_what_stands_in_strings_counts_for_nothing_where_it_matters() -> None:
    body = orjson.dumps({"content": '[{",\\"' * 10_000})
    assert count_values(body, 12, 2) <= 12


def test_a_prompt_of_128_thousand_tokens_is_within_the_usual_limits() -> None:
    body = orjson.dumps({"model": "chat", "prompt": list(range(131_072))})
    assert count_values(body, 500_000, 200) < 140_000


HOSTILE = {
    "backslashes": b"\\\\",
    "escaped quotes": b'\\"',
    "quotes": b'""',
    "brackets": b"[]",
    "brackets in a string": b"[{",
}


@pytest.mark.parametrize("pump", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("begin", [b"", b'{"a":"'], ids=["bare", "in a string"])
def test_sixteen_mebibytes_of_anything_are_counted_in_linear_time(
    begin: bytes, pump: bytes
) -> None:
    def counted(size: int) -> None:
        count_values(begin + pump * size, 10**9, 10**9)

    assert is_linear(counted, 8_000_000 // FACTOR)
