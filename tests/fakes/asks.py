"""Requests as the proxy has read them, without a client."""

from __future__ import annotations

from typing import Any

from multidict import CIMultiDict

from proxy.engine.upstream import Upstream
from proxy.home.prefix import read_prompt
from proxy.line.line import Lane
from proxy.pages import Kind
from proxy.request import Ask


def upstream(name: str, slots: int = 1, model: str = "chat", key: str = "key") -> Upstream:
    return Upstream(name, model, slots, f"/run/{name}.sock", "", 0, key)


def ask(
    *texts: str,
    client: str = "a",
    lane: Lane = "interactive",
    patience_s: float = 60.0,
    kind: Kind = Kind.CHAT,
    session: str | None = None,
) -> Ask:
    """Return a chat of these texts, from the user, the assistant, the user, and so on."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    members: dict[str, Any] = {"model": "chat", "messages": messages}
    return Ask(
        request_id="req_1",
        method="POST",
        path="/v1/chat/completions",
        query="",
        headers=CIMultiDict(),
        body=b"",
        members=members,
        kind=kind,
        model="chat",
        client=client,
        lane=lane,
        patience_s=patience_s,
        prompt=read_prompt(kind, "chat", members),
        session=session,
    )
