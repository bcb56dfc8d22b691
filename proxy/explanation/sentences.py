"""What each cause means, in plain English, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from proxy.explanation.cache_finding import CacheFinding
from proxy.explanation.causes import Cause
from proxy.prompt_cache.no_file import NoFile
from proxy.slot_files.tiers import Tier

_OFTEN: Final = 2
_ADVICE: Final = MappingProxyType(
    {
        Cause.SYSTEM_PROMPT_CHANGED: "keep the system prompt the same in all requests, and put "
        "what changes (a date, a working directory) into the latest message",
        Cause.TOOLS_CHANGED: "send the same tools in the same order with each request of a "
        "conversation",
        Cause.HISTORY_TRUNCATED: "keep the whole history as long as it fits into ctx-size, or drop "
        "much of it at once and seldom",
        Cause.MESSAGE_CHANGED: "send earlier messages as they were; only what is appended is cheap",
        Cause.OTHER_INSTANCE: "more slots for each instance, or fewer replicas with more slots, "
        "let conversations stay where their cache is",
        Cause.SLOT_EVICTED: "raise parallel to as many slots as conversations alternate, or "
        "cache-ram, where the engine keeps what leaves a slot",
        Cause.SLOT_BUSY: "send the requests of a conversation one after the other, or raise "
        "cache-ram, from which other slots are filled",
        Cause.MODEL_UNLOADED: "let the model stay loaded longer (ttl_s, or keep_alive of "
        "the request), or save slots (persist_slots) so that caches come back with it",
        Cause.ENGINE_RESTARTED: "corral logs shows why the engine ended",
        Cause.SLIDING_WINDOW: "set swa-full = true among the model's flags (more memory), or only "
        "append to a conversation",
        Cause.RECURRENT_STATE: "only append to a conversation: the state of a recurrent model "
        "cannot be cut back",
        Cause.CACHE_OFF: "leave out cache_prompt, or set it to true",
        Cause.NOT_FOUND: "corral slots shows what the slots hold",
        Cause.QUEUE: "more slots (parallel) or replicas, or X-Corral-Priority: batch for requests "
        "that can wait",
        Cause.LOADING: "load the model before it is needed (corral load), or let it stay loaded "
        "longer (ttl_s)",
        Cause.SLOW_CLIENT: "let the client read the stream as it comes; until then the slot stays "
        "in use",
    }
)


def advice(cause: Cause) -> str | None:
    """Return what to do, or None where nothing is to be done."""
    return _ADVICE.get(cause)


def cache_sentence(found: CacheFinding) -> str:
    """Say what was found of a prompt in the cache, and why not more."""
    if found.cause is Cause.ALL_FOUND:
        return f"{_were_found(found)}: all that could be"
    if found.cause is Cause.FIRST_REQUEST:
        return _first(found)
    if change := _CHANGES.get(found.cause):
        return f"{_differs(found)}: {change(found)}"
    why = _LOSSES[found.cause].format(
        instance=f"instance {found.earlier_instance}",
        age=_age(found),
        wait=_wait(found),
        held=_held(found),
    )
    on_disk = f"; {_NO_FILE[found.no_file]}" if found.no_file in _NO_FILE else ""
    return f"{_were_found(found)}, {found.reusable} could be: {why}{on_disk}"


def _were_found(found: CacheFinding) -> str:
    of_prompt = f"{found.found} of {found.tokens} prompt tokens were"
    if found.tier != Tier.DISK:
        return f"{of_prompt} in the cache"
    if found.restore_ms is None:
        return f"{of_prompt} on disk, restored when the engine started"
    return f"{of_prompt} on disk, restored in {found.restore_ms / 1000:.2f} s"


def _first(found: CacheFinding) -> str:
    if found.is_continued:
        return (
            "this server has not seen the conversation before (it may have begun elsewhere, or "
            f"before the daemon started): {_were_found(found)}"
        )
    if found.found:
        return f"the first request of a conversation: {_were_found(found)}, shared with others"
    return f"the first request of a conversation: all {found.tokens} prompt tokens were computed"


def _differs(found: CacheFinding) -> str:
    about = "about " if found.is_about else ""
    return f"{_place(found)} differs at {about}token {found.token} of {found.tokens}"


def _place(found: CacheFinding) -> str:
    if found.role == "tools":
        return "the list of tools"
    if found.message is not None:
        return f"message {found.message}"
    return "the system prompt" if found.role == "system" else "the prompt"


def _system(found: CacheFinding) -> str:
    if found.repeated >= _OFTEN:
        return "your client changes its system prompt on every request"
    return f"your client sent another system prompt{_than(found)}"


def _tools(found: CacheFinding) -> str:
    if found.repeated >= _OFTEN:
        return "your client sends other tools with every request"
    return f"your client sent other tools{_than(found)}"


def _truncated(found: CacheFinding) -> str:
    left_out = "a message" if found.dropped == 1 else f"{found.dropped} messages"
    return f"your client left out {left_out} that its request {found.earlier} had there"


def _changed(found: CacheFinding) -> str:
    if found.role == "assistant":
        return "your client does not send the model's answer back as it was"
    return f"your client changed it{_than(found)}"


def _than(found: CacheFinding) -> str:
    return f" than in its request {found.earlier}" if found.earlier else ""


def _held(found: CacheFinding) -> str:
    return "this one" if found.earlier else "its beginning"


def _wait(found: CacheFinding) -> str:
    if found.is_awaited:
        return "which had no slot free; it waited for one as long as that was worth it"
    return "which was busy, slower or failing"


def _age(found: CacheFinding) -> str:
    return "" if found.age_s is None else f" ({found.age_s:g} s ago)"


_CHANGES: Final[Mapping[Cause, Callable[[CacheFinding], str]]] = MappingProxyType(
    {
        Cause.SYSTEM_PROMPT_CHANGED: _system,
        Cause.TOOLS_CHANGED: _tools,
        Cause.HISTORY_TRUNCATED: _truncated,
        Cause.MESSAGE_CHANGED: _changed,
    }
)
_NOT_FROM_END: Final = "this prompt does not go on from the end of what the slot held"
_LOSSES: Final = MappingProxyType(
    {
        Cause.OTHER_INSTANCE: "the conversation's cache is in {instance}, {wait}",
        Cause.SLOT_EVICTED: "other conversations took the slot that held {held}",
        Cause.SLOT_BUSY: "another request of this conversation was using its slot",
        Cause.MODEL_UNLOADED: "the model was unloaded after the request before{age}, and its cache "
        "did not come back",
        Cause.ENGINE_RESTARTED: "the engine of {instance} ended by itself after the request "
        "before{age}, and its cache with it",
        Cause.SLIDING_WINDOW: f"the model has a sliding window, and {_NOT_FROM_END}",
        Cause.RECURRENT_STATE: f"the model is recurrent, and {_NOT_FROM_END}",
        Cause.CACHE_OFF: "the request has cache_prompt: false",
        Cause.NOT_FOUND: "{instance} no longer held the rest",
    }
)
# After what was lost.
_NO_FILE: Final[Mapping[NoFile | None, str]] = MappingProxyType(
    {
        NoFile.OFF: "it saves nothing on disk (corral slots says why)",
        NoFile.COST: "saving it on disk did not pay",
        NoFile.LIMIT: "the limits of disk space or of writes in an hour kept it from being saved",
        NoFile.DELETED: "its slot file was deleted (by age or room), or could not be read",
        NoFile.OTHER_BUILD: "its slot file is of another build or other options",
        NoFile.FAILED: "its slot file could not be restored",
    }
)
