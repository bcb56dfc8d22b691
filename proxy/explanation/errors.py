"""What each error of a request means, and what to do about it: by its code. Pure.

Messages of errors are not stored, as they may quote a client; the response has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_LIMIT: Final = "send less, or raise the limit that the response names"
_FAULT: Final = "corral logs has the details; corral report collects them for a bug report"
_ENGINE: Final = "corral logs {model} shows what the engine said"
_KEY: Final = "corral key list shows the keys and their limits"
# By code: what happened, as a clause, and what to do; None where nothing is to be done.
_MEANINGS: Final[Mapping[str, tuple[str, str | None]]] = MappingProxyType(
    {
        "body_expands": ("the decompressed body is too many times larger", _LIMIT),
        "body_memory_full": (
            "the bodies of all requests together used too much memory",
            "send again after Retry-After, or raise body_memory_bytes under [proxy]",
        ),
        "body_too_complex": ("the body has too many values, or too many levels", _LIMIT),
        "body_too_large": ("the body has too many bytes", _LIMIT),
        "conflict": (
            "the file or the batch is in a state that does not allow it",
            "corral batch list shows the states",
        ),
        "context_length_exceeded": (
            "the prompt is longer than the context of {model}",
            "send a shorter one, or raise ctx-size among the model's flags",
        ),
        "crashes_engine": (
            "engines crashed twice while they computed this request",
            "change the request; corral report collects what a bug report needs",
        ),
        "draining": ("the server was stopping", "send again after Retry-After"),
        "expectation_failed": (
            "the header Expect asks for more than 100-continue",
            "send no other Expect",
        ),
        "forbidden": (
            "the Host, the Origin or the API key does not allow it",
            "allowed_hosts and allowed_origins under [proxy], or the key's models, do not name it",
        ),
        "header_too_large": ("the header has too many fields, or too long ones", "send fewer"),
        "internal_error": ("there was a fault in llama-corral itself", _FAULT),
        "invalid_api_key": ("it had no API key, or an unknown one", _KEY),
        "invalid_request": (
            "the request is invalid",
            "the response says which member is wrong, and why",
        ),
        "invalid_token": (
            "the link to the dashboard was used already, or is too old",
            "corral ui makes a new one",
        ),
        "limit_exceeded": ("a member of the request exceeds a limit of [proxy.limits]", _LIMIT),
        "method_not_allowed": (
            "the path does not allow this method",
            "the header Allow of the response names those that it allows",
        ),
        "model_failed": (
            "{model} cannot be loaded: it failed, does not fit into memory, or was stopped",
            "corral status shows the cause and its cure; corral start {model} tries again",
        ),
        "model_loading": (
            "{model} was not loaded within the time that the request could wait",
            "load the model before it is needed (corral load), or raise queue_timeout_s",
        ),
        "model_not_found": (
            "there is no model of this name",
            "corral status lists the names; aliases under [models.NAME] adds one",
        ),
        "not_found": ("there is no such path", "the HTTP API's page lists those that there are"),
        "not_loaded": (
            "the model is not loaded, and this request loads none",
            "corral load {model} loads it",
        ),
        "not_served": (
            "this endpoint of Ollama's API is not served here",
            "the HTTP API's page lists those that are",
        ),
        "previous_response_not_found": (
            "the response that it continues is not stored, for this API key",
            "send the whole conversation; with [proxy.stored_responses] they are kept for a day",
        ),
        "queue_full": (
            "too many requests waited for {model}",
            "more slots (parallel) or replicas, or a longer queue (queue_max under [proxy])",
        ),
        "queue_timeout": (
            "no slot of {model} became free within the time that the request could wait",
            "more slots (parallel) or replicas, or a longer queue_timeout_s under [proxy]",
        ),
        "rate_limit_exceeded": (
            "its API key is over a limit",
            f"send again after Retry-After; {_KEY}",
        ),
        "request_cancelled": ("an operator cancelled it", None),
        "request_timeout": ("the client did not send its request in time", None),
        "session_required": (
            "it needs a session of the dashboard, or the API key of an admin",
            "corral ui opens a session",
        ),
        "storage_failed": ("the database of jobs could not be used", _FAULT),
        "storage_full": (
            "no space was left for files and results of batches",
            "delete old files and batches, or make space on the disk",
        ),
        "unavailable": (
            "nothing could serve the request",
            "corral status shows what is loaded, and why the rest is not",
        ),
        "unknown_content_encoding": (
            "the encoding of the body is not supported",
            "send it plain, or with gzip or deflate",
        ),
        "unsupported_media_type": ("the body is no JSON", "send JSON, and say so in Content-Type"),
        "upstream_crashed": (
            "the engine of {instance} crashed while it computed this request",
            f"{_ENGINE}; it is restarted",
        ),
        "upstream_failed": ("{instance} failed while it answered", _ENGINE),
        "upstream_killed": (
            "another program killed the engine of {instance} while it computed this request",
            "send it again; corral logs {model} has the signal, and the system's log may say whose",
        ),
        "upstream_timeout": (
            "{instance} sent nothing for too long",
            f"{_ENGINE}; upstream_read_timeout_s under [proxy] is the limit",
        ),
        "wait_too_long": (
            "the first token was expected later than the client waits (Prefer: wait)",
            "let it wait longer, or ask for another model",
        ),
    }
)
# Where an engine or a node has a code of its own.
_REFUSED: Final = ("{instance} refused the request", "the response says why")
_BROKEN: Final = ("{instance} answered with an error of its own", _ENGINE)
_DISCONNECTED: Final = 499


def error_meaning(
    status: int, code: str | None, *, model: str | None, instance: str | None
) -> tuple[str, str | None]:
    """Return what an error means, as a clause, and what to do; None if nothing is to be done.

    `status` is 400 to 599.
    """
    if status == _DISCONNECTED and code is None:
        return "the client disconnected before the end", None
    known = _MEANINGS.get(code or "", _REFUSED if status < 500 else _BROKEN)
    names = {"model": model or "the model", "instance": instance or "the server"}
    meaning, cure = known
    return meaning.format(**names), cure and cure.format(**names)
