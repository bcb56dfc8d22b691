"""Reads an HTTP request into a ProxyRequest.

The body is parsed as the engine will parse it: as a form if the endpoint takes forms and the
request declares one, otherwise as JSON. `id_slot` is removed, because a client that names a slot in
use corrupts another client's text (builds 10434 and 11434). `keep_alive` is for the supervisor and
removed too. A variant changes the body. Other JSON is forwarded byte for byte; a form is encoded
again.

`session_id` is the client's name for a conversation, wherever its program puts it. Of several names
the first in the order below counts, the most exact. `x-client-request-id` is not used, because some
clients make a new one for each request. Source: Claude Code, opencode, Codex, Amp and
llama-server's web page, as they send it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.auth.api_keys import KEY
from proxy.cache.prompt import ANYONE, CacheOwner, Prompt, read_prompt
from proxy.common.headers import (
    CACHE_OWNER,
    HOLDER,
    HOP,
    PRIORITY,
    SESSION_FIRST,
    SESSION_LAST,
    for_upstream,
)
from proxy.common.toml_types import duration_s
from proxy.errors import BadRequest
from proxy.http.body import (
    LARGE_BYTES,
    Share,
    check_complexity,
    check_small,
    members_of,
    read_body,
)
from proxy.http.forms import Form, is_form, read_form
from proxy.request.engine_members import engine_members, with_chosen_tools
from proxy.request.limits import check
from proxy.request.models import ModelNames
from proxy.request.variants import MEMBER as LORA
from proxy.request.variants import check_fixed, with_adapter
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind, endpoint_kind

KEEP_ALIVE: Final = "keep_alive"
# Claude Code writes user_…_account_…_session_UUID, later versions an object as a string.
_IN_USER_ID: Final = re.compile(r'_session_([\w-]{8,64})|"session_id"\s*:\s*"([\w-]{8,64})"')
_NAME_MAX_CHARACTERS: Final = 512
_USER_MAX_CHARACTERS: Final = 4096


def session_id(headers: Mapping[str, str], members: Mapping[str, Any]) -> str | None:
    """Return the client's name for the conversation, 1 to 512 characters, or None."""
    given = (
        *map(headers.get, SESSION_FIRST),
        members.get("prompt_cache_key"),
        *map(headers.get, SESSION_LAST),
        _in_metadata(members["metadata"]) if "metadata" in members else None,
    )
    for value in filter(None, given):
        if isinstance(value, str) and (name := value[:_USER_MAX_CHARACTERS].strip()):
            return name[:_NAME_MAX_CHARACTERS]
    return None


def _in_metadata(metadata: object) -> str | None:
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _IN_USER_ID.search(user[:_USER_MAX_CHARACTERS]) if isinstance(user, str) else None
    return found[1] or found[2] if found else None


Priority = Literal["interactive", "batch"]


_WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?![\w.])", re.IGNORECASE)
_PREFER_MAX_CHARACTERS: Final = 1024
_OWNER_MAX_CHARACTERS: Final = 64
_OURS: Final = frozenset({"id_slot", KEEP_ALIVE})
_WITH_FORMAT: Final = frozenset({EndpointKind.CHAT, EndpointKind.RESPONSES})
# More slots than any instance has; the engine refuses a larger number.
_CHOICES_MAX: Final = 4096
# Members that may ask for several answers.
_SEVERAL: Final = frozenset({"n", "n_cmpl", "prompt"})


# Not frozen: that would take nine microseconds for each request.
@dataclass(slots=True)
class ProxyRequest:
    """A request for a model. Nothing changes it once it is read."""

    kind: EndpointKind
    model: str
    queue_timeout_s: float
    body: bytes = b""  # As it is forwarded, like `json`.
    # The members of a JSON object, or the texts of a form.
    json: Mapping[str, Any] = field(default_factory=dict)
    prompt: Prompt | None = None
    form: Form | None = None
    slots: int = 1
    # Time that its model stays loaded without requests, infinite for ever; None if not given.
    keep_alive_s: float | None = None
    remote_variant: str = ""  # Name of a variant that a node applies; empty for none.
    # Name of the LoRA adapter that its `lora` selects, empty for none; None if the model has no
    # adapters here or the client wrote `lora`.
    adapter: str | None = None
    owner: CacheOwner = ANYONE  # Owner of the caches that it uses.
    request_id: str = ""
    method: str = "POST"
    path: str = ""
    query: str = ""  # Raw query, without the question mark.
    # Header fields that an instance may see.
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    client: str = ""  # Name of an API key, or an address; for fairness and limits.
    priority: Priority = "interactive"
    session: str | None = None
    is_from_proxy: bool = False  # Whether another llama-corral forwarded it; then no node gets it.
    holder: str = ""  # The process of a node that has most of its conversation; empty: unknown.
    is_background: bool = False  # Whether no client waits for it; then it does not prevent eviction
    # Whether it belongs to a request that was queued before, so that the queue's limit does not
    # apply.
    is_let_in: bool = False
    # Whether other requests ask for one answer each to the same prompt, so all of it is worth
    # saving.
    is_branch: bool = False
    # Whether its answer can be interrupted and continued, for requests of higher priority.
    may_yield: bool = False
    # Whether it may load its model; False with the query parameter `autoload=false`.
    is_autoload: bool = True
    wait_s: float | None = None  # Time that the client waits for the first token; None if not given
    # Most prompt tokens that its API key permits; None for any number.
    max_context: int | None = None
    rules: str | None = None  # The prompt rules that changed it, with spaces.
    # How often a broken tool call is generated again; None if calls are not checked.
    call_retries: int | None = None

    @property
    def may_load(self) -> bool:
        """Whether it may load a model; GET and HEAD never do."""
        return self.is_autoload and self.method not in {"GET", "HEAD"}

    @property
    def is_stream(self) -> bool:
        return self.json.get("stream") is True

    @property
    def gathers(self) -> bool:
        """Whether it gathers with other batch requests; a forwarded one has done so before."""
        return self.priority == "batch" and self.kind.takes_slot and not self.is_from_proxy


def client_of(request: web.BaseRequest) -> str:
    key = request[KEY]
    return key.name if key else request.remote or ""


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of one of our endpoints into an instance's endpoint."""

    path: str
    kind: EndpointKind
    # Translates our members into its members; raises BadRequest.
    members: Callable[[dict[str, Any]], dict[str, Any]]
    # Returns how long a body may become; long ones are read in a thread.
    size_bytes: Callable[[bytes], int] = len


def cache_owner(request: web.BaseRequest, settings: ProxySettings) -> CacheOwner:
    """Return the owner of a request's caches; another llama-corral names its client's owner."""
    key, given = request[KEY], request.headers.get(CACHE_OWNER)
    if given is not None:
        name = f"{key.name if key else ''}\0{given[:_OWNER_MAX_CHARACTERS]}"
        return CacheOwner(name, is_alone=True)
    return CacheOwner(key.name, settings.share_caches == "key") if key else ANYONE


async def read_request(
    request: web.BaseRequest,
    request_id: str,
    names: ModelNames,
    share: Share,
    translation: Translation | None = None,
) -> ProxyRequest:
    """Read a request for one of the client's models; apply `translation` if given.

    Raises:
        BadRequest: The body is neither a JSON object nor a form, or names no model among several.
        LimitExceeded: It exceeds a limit of `[proxy.limits]`.
        UnknownModel: No model has the name.
        ProxyError: See `read_body` and `check_complexity`.
    """
    path = translation.path if translation else request.path
    kind = translation.kind if translation else endpoint_kind(request.method, path)
    url, settings, is_posted = request.rel_url, share.settings, request.method == "POST"
    named = url.query.get("model") if url.raw_query_string else None
    body = await read_body(request, share) if is_posted else b""
    if is_posted and translation is None and not kind.takes_forms and len(body) <= LARGE_BYTES:
        check_small(body, share)  # most requests
        owner = cache_owner(request, settings)
        change = prompt_change(request, names) if names.prompt_rules else None
        read = json_request(body, kind, named, names, settings, owner, change)
    elif is_posted:
        read = await _read_body(request, body, kind, named, names, share, translation)
    else:
        read = ProxyRequest(kind, names.resolve(named).model_info.id, settings.queue_timeout_s)
    complete(read, request, request_id, path)
    return read


def complete(read: ProxyRequest, request: web.BaseRequest, request_id: str, path: str) -> None:
    """Set the fields that do not come from the body."""
    key, given = request[KEY], request.headers
    read.request_id, read.client = request_id, key.name if key else request.remote or ""
    read.method, read.path, read.query = request.method, path, request.rel_url.raw_query_string
    read.headers = for_upstream(given)
    if request.method == "POST":
        # The engine parses the body by its content type, which must match our parsing.
        read.headers["Content-Type"] = read.form.content_type if read.form else "application/json"
    if "Prefer" in given and (wait_s := _wait_s(given.getall("Prefer"))) is not None:
        read.wait_s, read.queue_timeout_s = wait_s, min(wait_s, read.queue_timeout_s)
    is_batch = key is not None and key.priority == "batch"
    is_batch = is_batch or given.get(PRIORITY, "").strip().lower() == "batch"
    if is_batch or read.json.get("service_tier") == "flex":
        read.priority = "batch"
    read.session = session_id(given, read.json)
    read.is_from_proxy = HOP in given
    if HOLDER in given and (key is None or key.admin):
        read.holder = given[HOLDER]
    # Like llama-server's router mode. Source: tools/server/server-models.cpp.
    if read.query:
        read.is_autoload = request.query.get("autoload", "") in {"", "1", "true"}


async def _read_body(  # noqa: PLR0913, PLR0917 (for forms, translations and threads)
    request: web.BaseRequest,
    body: bytes,
    kind: EndpointKind,
    named: str | None,
    names: ModelNames,
    share: Share,
    translation: Translation | None,
) -> ProxyRequest:
    settings, owner = share.settings, cache_owner(request, share.settings)
    change = prompt_change(request, names) if names.prompt_rules else None
    content_type = request.headers.get("Content-Type", "")
    if kind.takes_forms and is_form(content_type):
        form = await read_form(content_type, body)
        return await share.run(len(body), lambda: _form_request(form, kind, named, names, settings))
    await check_complexity(body, share)
    if translation is None:
        return await share.run(
            len(body), lambda: json_request(body, kind, named, names, settings, owner, change)
        )

    def read() -> ProxyRequest:
        members = members_of(body)
        translated = translation.members(members)
        whole = body if translated is members else encode_members(translated)
        return json_request(whole, kind, named, names, settings, owner, change)

    found = await share.run(translation.size_bytes(body), read)
    share.add_bytes(max(0, len(found.body) - len(body)))
    return found


def _form_request(
    form: Form, kind: EndpointKind, named: str | None, names: ModelNames, settings: ProxySettings
) -> ProxyRequest:
    members = form.texts()
    form = form.without(KEEP_ALIVE)
    check(kind, members, settings.limits)
    model = names.resolve(members.get("model") or named).model_info.id
    return ProxyRequest(
        kind,
        model,
        settings.queue_timeout_s,
        form.encode(),
        members,
        form=form,
        keep_alive_s=keep_alive_s(members),
    )


# Applies a client's prompt rules to members; returns the rules that changed them, with spaces.
PromptChange = Callable[[EndpointKind, dict[str, Any]], tuple[dict[str, Any], str | None]]


def prompt_change(request: web.BaseRequest, names: ModelNames) -> PromptChange | None:
    """Return the effect of the prompt rules of a request's client; None if it has none."""
    all_rules = names.prompt_rules
    if all_rules is None:
        return None
    headers, client = request.headers, client_of(request)
    rules = all_rules.of(client, headers.get("User-Agent", ""))
    if not rules:
        return None

    def change(kind: EndpointKind, members: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        session = session_id(headers, members)
        changed, applied = all_rules.apply(rules, kind, members, client, session)
        return changed, " ".join(applied) or None

    return change


def json_request(  # noqa: PLR0913, PLR0917 (separate facts)
    body: bytes,
    kind: EndpointKind,
    named: str | None,
    names: ModelNames,
    settings: ProxySettings,
    owner: CacheOwner,
    change: PromptChange | None = None,
) -> ProxyRequest:
    """Read a JSON body that passed `check_complexity`; raises like `read_request`.

    `named` is the model if the body names none.
    """
    members = members_of(body)
    pick = names.resolve(named_model(members) or named)
    applied = pick.variant.apply_to(members) if pick.variant and kind.takes_variants else members
    stays_s = keep_alive_s(applied) if KEEP_ALIVE in applied and kind.takes_slot else None
    forwarded = applied
    if not _OURS.isdisjoint(applied):
        forwarded = {name: value for name, value in applied.items() if name not in _OURS}
    check(kind, forwarded, settings.limits)
    if pick.model_info.has_fixed_adapters and kind.takes_slot:
        check_fixed(forwarded, pick.model_info.id)
    adapter = None
    if pick.model_info.adapters and kind.takes_slot:
        if not forwarded.get(LORA):
            adapter = pick.adapter
        forwarded = with_adapter(forwarded, pick.model_info.adapters, pick.adapter)
    if isinstance(forwarded.get("tool_choice"), dict):
        forwarded = with_chosen_tools(kind, forwarded)
    if kind is EndpointKind.RESPONSES:
        forwarded = engine_members(forwarded)
    if kind in _WITH_FORMAT and isinstance(forwarded.get("response_format"), dict):
        forwarded = _with_object_schema(forwarded)
    forwarded, rules = change(kind, forwarded) if change else (forwarded, None)
    model = pick.model_info.id
    return ProxyRequest(
        kind,
        model,
        settings.queue_timeout_s,
        body if forwarded is members else encode_members(forwarded),
        forwarded,
        read_prompt(kind, model, forwarded, owner),
        slots=choices_of(kind, forwarded),
        keep_alive_s=stays_s,
        remote_variant=pick.remote_variant,
        adapter=adapter,
        owner=owner,
        rules=rules,
    )


def choices_of(kind: EndpointKind, members: Mapping[str, Any]) -> int:
    """Return the number of answers to each prompt, 1 to 4096; `members` may have any types.

    Source: llama-server, build 10434: `n` and `n_cmpl` mean the same on every endpoint that
    generates text except Anthropic's, up to the number of slots; each answer takes its own slot.
    """
    if "n" not in members and "n_cmpl" not in members:
        return 1
    if not kind.generates or kind is EndpointKind.MESSAGES:
        return 1
    return max(_count(members.get("n")), _count(members.get("n_cmpl")))


def is_single(members: Mapping[str, Any]) -> bool:
    """Return whether the body wants one answer to one prompt."""
    if _SEVERAL.isdisjoint(members):
        return True
    has_one_choice = members.get("n", 1) in (None, 1) and members.get("n_cmpl", 1) in (None, 1)
    prompt = members.get("prompt")
    if not has_one_choice or not isinstance(prompt, list) or len(prompt) < 2:
        return has_one_choice
    return any(isinstance(part, int) for part in prompt)  # one prompt in tokens


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    return int(min(max(value, 1), _CHOICES_MAX))


def _with_object_schema(members: dict[str, Any]) -> dict[str, Any]:
    """Add a schema for `json_object`; return the same object if nothing changes.

    Without a schema the engine accepts any text, even if the request has a `json_schema`, but in
    OpenAI's API the response is a JSON object. Builds that enforce `json_object` themselves treat
    both alike.

    Source: measured on build 10434; OpenAI's API reference, "Create chat completion".
    """
    match members["response_format"]:
        case {"type": "json_object", **rest} if not (rest.get("schema") or members.get("grammar")):
            schema = members.get("json_schema") or {"type": "object"}
            wanted = {"type": "json_object", **rest, "schema": schema}
            return {**members, "response_format": wanted}
    return members


def _wait_s(preferences: Iterable[str]) -> float | None:
    """Return the client's preference `wait`. Source: RFC 7240 section 4.3."""
    wanted = _WAIT.search(",".join(preferences)[:_PREFER_MAX_CHARACTERS])
    return float(wanted[1]) if wanted else None


def encode_members(members: Mapping[str, Any]) -> bytes:
    """Encode members as a body; raise BadRequest if they are nested too deeply."""
    try:
        return orjson.dumps(members)
    except TypeError as error:  # parsing allows more levels than serialising
        raise BadRequest(f"the body cannot be serialised again: {error}") from error


def named_model(members: Mapping[str, Any]) -> str | None:
    name = members.get("model")
    if name is None or isinstance(name, str):
        return name
    raise BadRequest("the member model must be a string")


def keep_alive_s(members: Mapping[str, Any]) -> float | None:
    """Return how long the model stays loaded after the request; None without `keep_alive`.

    0 unloads the model after the answer; a negative value keeps it loaded for ever (infinity).
    Source: Ollama, api/types.go (Duration); its clients also send numbers as strings.

    Raises BadRequest: the value is neither a number nor a duration.
    """
    seconds: float | None = None
    match members.get(KEEP_ALIVE):
        case None:
            return None
        case str() as text:
            seconds = duration_s(text)
        case int() | float() as number if not isinstance(number, bool):
            seconds = number
    if seconds is None:
        raise BadRequest(
            f"the member {KEEP_ALIVE} must be seconds as a number, or a duration such as "
            '"5m" or "1h30m"; 0 unloads the model after the answer, -1 keeps it loaded'
        )
    return math.inf if seconds < 0 else float(seconds)
