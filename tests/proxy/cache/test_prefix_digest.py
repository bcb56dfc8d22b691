"""The digest of our caches for other machines: by client, bounded, expiring, and in steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.requests import ask, upstream

from proxy.cache import remote_prefixes
from proxy.cache.prompt import Prompt, read_prompt, toggle_model_name
from proxy.cache.remote_prefixes import (
    DIGEST_MAX_BYTES,
    HASHES_MAX,
    Digest,
    PrefixDigests,
    UnreadableDigest,
    read_digest,
)
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.upstream.endpoint_kinds import EndpointKind

REPLY = {"content": "yes"}


class Told:
    """Digests at a time that the test sets, after a first look."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.digests = PrefixDigests(lambda: self.now_s)
        self.cursor = self.look("").cursor

    def look(self, cursor: str, client: str | None = "front") -> Digest:
        digest = self.digests.after(cursor, client, ["chat"])
        assert digest
        return digest

    def note(self, *texts: str, client: str = "front", instance: str = "chat.0") -> Prompt:
        prompt = ask(*texts).prompt
        assert prompt
        self.digests.note(instance, "chat", client, prompt, REPLY)
        return prompt


@pytest.fixture
def told() -> Told:
    return Told()


def ends(prompt: Prompt, name: str = "chat") -> list[int]:
    """Return the length that a digest gives for a prompt and its answer."""
    return [
        toggle_model_name(turn_digest, name)
        for turn_digest in (*prompt.turn_hashes, prompt.hash_with_reply(REPLY))
    ]


async def test_nothing_is_kept_before_somebody_asks() -> None:
    router = Router()
    router.admit(upstream("chat.0"))
    found = []
    for _ in range(2):
        async with router.lease(ask("hello")) as lease:
            router.finish(lease, Completion(None, REPLY))
        found.append(router.cache.digests.after("", None, ["chat"]))
    assert [bool(digest and digest.hashes) for digest in found] == [False, True]


def test_only_entries_after_the_cursor_are_reported(told: Told) -> None:
    first = told.note("hello")
    digest = told.look(told.cursor)
    assert (digest.is_whole, list(digest.hashes["chat"])) == (False, ends(first))
    assert told.digests.after(digest.cursor, "front", ["chat"]) is None
    second = told.note("hello", "yes", "more")
    assert list(told.look(digest.cursor).hashes["chat"]) == ends(second)[2:]
    whole = told.look("")
    assert whole.is_whole
    assert list(whole.hashes["chat"]) == [*ends(first), *ends(second)[2:]]


@pytest.mark.parametrize("cursor", ["x", "-", "0-1", "\u00b2", "x" * 10_000])
def test_an_unknown_cursor_gets_everything(told: Told, cursor: str) -> None:
    told.note("hello")
    assert told.look(cursor).is_whole
    run = told.cursor.partition("-")[0]
    assert told.look(f"{run}-\u00b2").is_whole
    assert told.digests.after(f"{run}-{'9' * 10_000}", "front", ["chat"]) is None


def test_a_client_gets_only_its_own_prompts(told: Told) -> None:
    theirs = told.note("hello", client="other")
    assert not told.look(told.cursor).hashes
    # Without keys, everybody may see everything.
    assert list(told.look(told.cursor, None).hashes["chat"]) == ends(theirs)


def test_a_model_that_the_client_may_not_see_is_not_told_of(told: Told) -> None:
    told.note("hello")
    digest = told.digests.after(told.cursor, "front", ["other"])
    assert digest
    assert not digest.hashes


def test_the_entries_of_a_replaced_process_end_with_it(told: Told) -> None:
    told.note("one", instance="chat.0")
    kept = told.note("two", instance="chat.1")
    cursor = told.look(told.cursor).cursor
    told.digests.forget("chat.0")
    digest = told.look(cursor)
    assert (digest.is_whole, list(digest.hashes["chat"])) == (True, ends(kept))


def test_what_is_used_stays_and_the_rest_expires(told: Told) -> None:
    told.note("unused")
    used = told.note("used")
    cursor = told.look(told.cursor).cursor
    told.now_s += remote_prefixes.EXPIRES_S / 2
    told.note("used")
    assert list(told.look(cursor).hashes["chat"]) == ends(used)
    told.now_s += remote_prefixes.EXPIRES_S / 2 + 1
    assert list(told.look("").hashes["chat"]) == ends(used)


def test_a_digest_is_bounded(told: Told) -> None:
    for number in range(HASHES_MAX):
        told.note(str(number))
    whole = told.look("")
    assert len(whole.hashes["chat"]) == HASHES_MAX
    assert len(whole.to_bytes()) < DIGEST_MAX_BYTES
    assert read_digest(whole.to_bytes()) == whole


def test_two_machines_have_one_hash_for_a_text_under_any_name_of_the_model() -> None:
    members = {"messages": [{"role": "user", "content": "hello"}]}
    here = read_prompt(EndpointKind.CHAT, "chat", members)
    there = read_prompt(EndpointKind.CHAT, "vendor/chat-7b", members)
    assert here
    assert there
    assert here.turn_hashes != there.turn_hashes
    assert ends(here) == ends(there, "vendor/chat-7b")
    with_lora = read_prompt(EndpointKind.CHAT, "chat", {**members, "lora": [{"id": 0}]})
    assert with_lora
    assert not set(ends(with_lora)) & set(ends(here))


GOOD: dict[str, Any] = {
    "format": 1,
    "cursor": "a-1",
    "whole": True,
    "models": {"chat": "AAAAAAAAAAA="},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"cursor": None},
        {"cursor": "x" * 65},
        {"models": ["chat"]},
        {"models": {"chat": 7}},
        {"models": {"chat": "AAAA"}},
        {"models": {"chat": "%"}},
        {"models": {"chat": "A" * (HASHES_MAX + 3) * 32 + "="}},
        {"models": {str(number): "" for number in range(1025)}},
    ],
)
def test_what_is_no_digest_is_refused(changed: dict[str, Any]) -> None:
    assert read_digest(json.dumps(GOOD).encode()).hashes == {"chat": (0,)}
    with pytest.raises(UnreadableDigest):
        read_digest(json.dumps({**GOOD, **changed}).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"null", b"<html>", b"{}"])
def test_another_answer_is_no_digest(body: bytes) -> None:
    with pytest.raises(UnreadableDigest):
        read_digest(body)
