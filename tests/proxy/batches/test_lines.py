"""Files of requests: split while they arrive, then checked line by line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs_harness import CHAT, request

from proxy.batches.lines import LineSplitter, Validation
from proxy.batches.records import StoredLine
from proxy.errors import BadRequest, UnknownModel
from proxy.settings import JobSettings, ProxySettings


def split(pieces: list[bytes], settings: JobSettings) -> list[bytes]:
    splitter = LineSplitter(settings)
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.close()


SMALL = JobSettings(max_file_bytes=4096, max_lines=3, max_line_bytes=1024)


@given(st.lists(st.sampled_from([b"", b"a", b"\n", b"b\nc", b"\n\n"]), max_size=12))
def test_lines_are_those_of_the_file_with_any_pieces(pieces: list[bytes]) -> None:
    lines = split(pieces, JobSettings())
    assert lines == b"".join(pieces).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("pieces", "setting"),
    [
        ([b"a\n" * 4], "max_lines"),
        ([b"a\n" * 3, b"a"], "max_lines"),
        ([b"a" * 700] * 2, "line 1 .* max_line_bytes"),
        ([b"a\n" + b"a" * 700, b"a" * 400 + b"\n"], "line 2 .* max_line_bytes"),
        ([b"a" * 1000 + b"\n"] * 5, "max_lines|max_file_bytes"),
        ([b"a" * 5000], "max_file_bytes"),
    ],
)
def test_a_limit_is_named(pieces: list[bytes], setting: str) -> None:
    with pytest.raises(BadRequest, match=setting):
        split(pieces, SMALL)


def check_model(name: str | None) -> None:
    if name != "chat":
        raise UnknownModel(str(name), ["chat"])


def problems(*lines: bytes) -> list[dict[str, Any]]:
    validation = Validation(CHAT, ProxySettings(), check_model)
    for number, line in enumerate(lines, 1):
        validation.add(StoredLine(number, line))
    found: list[dict[str, Any]] = json.loads(validation.errors() or '{"data": []}')["data"]
    return found


def changed(**members: Any) -> bytes:
    line = json.loads(request("a")) | members
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 300 + b"]" * 300, "body_too_complex", None),
        (changed(custom_id=1), "invalid_type", "custom_id"),
        (changed(custom_id=""), "invalid_custom_id", "custom_id"),
        (changed(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (changed(method="GET"), "invalid_method", "method"),
        (changed(url="/v1/embeddings"), "invalid_url", "url"),
        (changed(body=[]), "invalid_request", "body"),
        (changed(body={"model": "other"}), "model_not_found", "body.model"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(line: bytes, code: str, param: str | None) -> None:
    (found,) = problems(request("first"), line)
    assert (found["code"], found["line"], found["param"]) == (code, 2, param)


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_member_that_is_missing_is_named(name: str) -> None:
    line = json.loads(request("a"))
    del line[name]
    (found,) = problems(json.dumps(line).encode())
    assert (found["code"], found["param"]) == ("missing_required_parameter", name)


def test_a_custom_id_is_used_once() -> None:
    (found,) = problems(request("a"), request("b"), request("a"))
    assert (found["code"], found["line"]) == ("duplicate_custom_id", 3)
    assert "line 1" in found["message"]


def test_a_file_of_blank_lines_is_empty() -> None:
    (found,) = problems(b"\n", b" \r\n")
    assert (found["code"], found["line"]) == ("empty_file", None)


def test_a_hundred_errors_are_told() -> None:
    assert len(problems(*[b"{"] * 150)) == 100
