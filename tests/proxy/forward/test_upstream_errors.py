"""An instance's own error, in the words of the client's library."""

import json

import pytest

from proxy.forward.upstream_errors import is_loading, reclassify_error, shorten_error
from proxy.http.api_formats import OPENAI, parse_error

BAD = {"code": 400, "message": "no", "type": "invalid_request_error"}


def body(error: object) -> bytes:
    return json.dumps({"error": error}).encode()


def test_a_mistake_of_the_client_is_no_fault_of_the_engine() -> None:
    said = {"code": 500, "message": "image input is not supported - hint", "type": "server_error"}
    status, body_sent = reclassify_error(500, body(said))
    assert (status, json.loads(body_sent)) == (
        400,
        {"error": {**said, "code": 400, "type": "invalid_request_error"}},
    )


@pytest.mark.parametrize(
    "message",
    [
        "[json.exception.type_error.302] type must be string, but is array",
        "Failed to parse messages: Missing 'role' in message: {}",
        "Failed to parse tools: Missing tool type: {}",
        "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] parse error",
        "Unknown reasoning format: x",
        "'messages' is required",
        '"prompt" must not be empty',
        "vector::_M_range_check: __n (which is 18446744073709551615) >= this->size()",
        "tools param requires --jinja flag",
        "got exception: Unexpected empty grammar stack after accepting piece: a (30)",
        "Cannot use both json_schema and grammar",
        "Cannot specify grammar with tools",
        "The model produced output that does not match the expected Content-only format",
    ],
)
def test_every_form_of_a_mistake_is_known(message: str) -> None:
    status, body_sent = reclassify_error(
        500, body({"code": 500, "message": message, "type": "server_error"})
    )
    assert (status, json.loads(body_sent)["error"]["message"]) == (400, message)


@pytest.mark.parametrize("message", ["x" * 999 + "\\n", "x" * 1000 + "\\", "é\\x01" * 9000])
def test_a_long_error_is_cut_between_characters(message: str) -> None:
    said = shorten_error(500, body({"code": 500, "message": message, "type": "server_error"}))
    error = parse_error(said or b"")
    assert error
    assert error["message"].removesuffix("… (the rest is too long to show)") in message


@pytest.mark.parametrize("said", [b"", b"x" * 9000, b'{"error":{"message":"', b'{"message":1}'])
def test_a_long_error_without_a_message_is_none(said: bytes) -> None:
    assert shorten_error(500, said) is None


@pytest.mark.parametrize("verb", ["", "support "], ids=["b10434", "b11434"])
def test_a_model_without_text_gets_an_error_with_its_purpose(verb: str) -> None:
    message = f"the current context does not {verb}logits computation. skipping"
    status, body_sent = reclassify_error(
        500, body({"code": 500, "message": message, "type": "server_error"})
    )
    error = parse_error(body_sent)
    assert error
    assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert "generates no text" in error["message"]


def test_what_a_model_does_not_do_is_not_asked_again() -> None:
    said = {"code": 501, "message": "no embeddings", "type": "not_supported_error"}
    status, body_sent = reclassify_error(501, body(said))
    assert (status, json.loads(body_sent)) == (400, {"error": {**said, "code": 400}})


@pytest.mark.parametrize(
    "message", ["Invalid input batch.", "Compute error.", "failed to decode", "std::bad_alloc", ""]
)
def test_faults_in_an_engines_own_words_stay_faults(message: str) -> None:
    fault = body({"code": 500, "message": message, "type": "server_error"})
    assert reclassify_error(500, fault) == (500, fault)


@pytest.mark.parametrize("said", [body({**BAD, "message": "compute error"}), b"", body([])])
def test_a_fault_of_the_engine_stays_one(said: bytes) -> None:
    assert reclassify_error(500, said) == (500, said)


@pytest.mark.parametrize("said", [b"", b"<html>", b"[]", b"{}", b'{"error":"no"}', body([])])
def test_what_is_no_error_of_client_server_is_told_in_one(said: bytes) -> None:
    error = json.loads(OPENAI.engine_error(500, said))["error"]
    shown = said.decode() or "no reason"
    assert error == {
        "param": None,
        "code": "server_error",
        "type": "server_error",
        "message": f"the instance refused the request with status 500: {shown}",
    }
    assert parse_error(said) is None


def test_only_a_model_that_loads_is_loading() -> None:
    loading = body({"code": 503, "message": "Loading model", "type": "unavailable_error"})
    assert is_loading(503, loading)
    assert not is_loading(500, loading)
    assert not is_loading(503, body(BAD))
    assert not is_loading(503, b"")


def test_an_input_that_is_too_long_is_the_clients_mistake() -> None:
    message = (
        "input (1100 tokens) is too large to process. "
        "increase the physical batch size (current batch size: 1024)"
    )
    status, body_sent = reclassify_error(500, body({"code": 500, "message": message}))
    error = parse_error(body_sent)
    assert (status, error and error["n_ctx"]) == (400, 1024)
    shown = parse_error(OPENAI.engine_error(status, body_sent))
    assert shown
    assert shown["code"] == "context_length_exceeded"
