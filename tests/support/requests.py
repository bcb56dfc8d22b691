"""Requests as the proxy has read them, without a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.cache.prompt import read_prompt
from proxy.request.request import Priority, ProxyRequest
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Upstream


def upstream(name: str, slots: int = 1, model: str = "chat", key: str = "key") -> Upstream:
    return Upstream(name, model, slots, f"/run/{name}.sock", "", 0, key)


def ask(
    *texts: str,
    client: str = "a",
    priority: Priority = "interactive",
    queue_timeout_s: float = 60.0,
    kind: EndpointKind = EndpointKind.CHAT,
    session: str | None = None,
) -> ProxyRequest:
    """Return a chat of these texts, from the user, the assistant, the user, and so on."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    members: dict[str, Any] = {"model": "chat", "messages": messages}
    return ProxyRequest(
        request_id="req_1",
        path="/v1/chat/completions",
        json=members,
        kind=kind,
        model="chat",
        client=client,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        prompt=read_prompt(kind, "chat", members),
        session=session,
    )


def with_tools(request: ProxyRequest) -> ProxyRequest:
    """Return the request of an agent."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    return replace(request, json={**request.json, "tools": tools})
