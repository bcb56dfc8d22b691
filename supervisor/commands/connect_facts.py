"""What `corral connect` reads of the running daemon, and the request that checks it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from supervisor.commands.batch_client import KEY_VARIABLE, connected
from supervisor.commands.batch_tls import raise_if_refused
from supervisor.connect import probe
from supervisor.connect.certificate import self_signed
from supervisor.connect.client import Api
from supervisor.connect.facts import Facts, ServedModel
from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, ModelStatus
from supervisor.errors import AccessDenied, CorralError, DaemonBusy, NoSuchModel, NotRunning
from supervisor.gguf.capabilities import makes_vectors
from supervisor.gguf.metadata import read
from supervisor.host.paths import directories
from supervisor.settings.load import load
from supervisor.settings.schema import Settings

# A model may have to be loaded, and its prompt computed, first.
_CHECK_TIMEOUT_S: Final = 600.0


def daemon_facts(model: str | None, small: str | None) -> Facts:
    """Read what clients are told.

    Raises:
        NotRunning: No daemon runs.
        NoSuchModel: It serves no such model, or none that answers chats.
        AccessDenied: It needs a key, and CORRAL_API_KEY has none.
    """
    try:
        status = Client(directories().control_socket).status()
    except NotRunning as error:
        raise NotRunning(error.message, hint="corral start starts it") from error
    with connected() as http:
        listed, needs_key = _listed(http)
    config = Path(status["config"]) if status["config"] else None
    settings = load(config, config_dir=directories().config).settings
    models = _chat_models(listed, status, settings)
    chosen = _chosen(model, models, _preferred(settings, status["models"]))
    return Facts(
        url=status["url"],
        models=models,
        model=chosen,
        small=_chosen(small, models, [chosen.name]),
        needs_key=needs_key,
        certificate=self_signed(status["tls_cert"]),
    )


def check(facts: Facts, api: Api) -> None:
    """Send one request as a client does.

    Raises:
        CorralError: It was refused, or its answer broke off.
    """
    body = probe.body(api, facts.model.name)
    with connected() as http:
        try:
            answer = http.post(
                api.value, json=body, headers=probe.headers(api), timeout=_CHECK_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            raise _unanswered(error) from error
    if answer.is_error:
        raise _refused(answer)
    if not probe.is_complete(api, answer.text):
        raise CorralError(
            f"{facts.model.name} broke off its answer at {api.value}",
            hint=f"corral logs {facts.model.name} shows why",
        )


def _listed(http: httpx.Client) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the models that the key may use, and whether one is needed."""
    try:
        answer = http.get("/v1/models", headers={"Authorization": ""})
        needs_key = answer.status_code == httpx.codes.UNAUTHORIZED
        if needs_key and os.environ.get(KEY_VARIABLE):
            answer = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise _unanswered(error) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise AccessDenied(
            f"the daemon needs an API key, and {KEY_VARIABLE} has none that it knows",
            hint=f"corral key add NAME makes one; then export {KEY_VARIABLE}=…",
        )
    if answer.is_error:
        raise _refused(answer)
    return answer.json()["data"], needs_key


def _chat_models(
    listed: Iterable[Mapping[str, Any]], status: DaemonStatus, settings: Settings
) -> tuple[ServedModel, ...]:
    """Return the models that answer chats, without their variants."""
    local = {one["name"]: one for one in status["models"]}
    return tuple(
        ServedModel(
            one["id"],
            one["context_length"],
            sees_images="image" in one["architecture"]["input_modalities"],
        )
        for one in listed
        if not one["variant_of"] and _chats(local.get(one["id"]), settings)
    )


def _chats(model: ModelStatus | None, settings: Settings) -> bool:
    """Return whether a model answers chats, as far as this machine knows."""
    if model is None:
        return True
    own = settings.models.get(model["name"])
    try:
        gguf = read(Path(model["path"]), cache_dir=directories().cache)
    except CorralError:
        return True
    return not makes_vectors(gguf, own.flags if own else {})


def _preferred(settings: Settings, models: Sequence[ModelStatus]) -> list[str]:
    """Return names in the order in which one is chosen: the default, those that are loaded."""
    default = settings.proxy.default_model
    loaded = [one["name"] for one in models if one["state"] == "loaded"]
    return [*([default] if default else []), *loaded]


def _chosen(
    name: str | None, models: Sequence[ServedModel], preferred: Sequence[str]
) -> ServedModel:
    by_name = {one.name: one for one in models}
    known = ", ".join(by_name) or "none"
    if name is None and models:
        return next((by_name[one] for one in preferred if one in by_name), models[0])
    if name not in by_name or name is None:
        what = f"no model named {name!r} answers chats" if name else "no model answers chats"
        raise NoSuchModel(what, hint=f"those that do: {known}")
    return by_name[name]


def _unanswered(error: httpx.HTTPError) -> CorralError:
    raise_if_refused(error)
    what = str(error) or type(error).__name__
    return DaemonBusy(f"the daemon does not answer: {what}", hint="corral status shows its state")


def _refused(answer: httpx.Response) -> CorralError:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"status {answer.status_code}"
    path = answer.request.url.path
    return CorralError(
        f"the daemon refused {path}: {message}", hint="corral status shows its models"
    )
