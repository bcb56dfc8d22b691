"""What the proxy needs of whoever runs the instances.

The models there are, one made ready, and prompts read ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxy.prompt_cache.shared_prefixes import SharedPrefix
from proxy.variant import Variant


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of a model.

    Attributes:
        id: The name clients use.
        aliases: Other names clients may use.
        state: `loaded` can answer now; `loading` is on its way; `unloaded` is loaded when asked
            for; `failed` cannot answer until somebody acts.
        created: Unix time in whole seconds; the same for the life of the model's entry.
        context_length: Tokens that one request may use, or None where not known yet.
        slots: Sequences that are decoded at once over all instances; 0 where not known yet.
        reason: Why it failed, in a sentence, or None.
        variants: What is made of requests for `ID:VARIANT`, by the name of the variant.
        is_local: Whether this machine has it; otherwise only others do.
        local_only: The same without other machines, where those make a difference.
    """

    id: str
    aliases: tuple[str, ...]
    state: Literal["loaded", "loading", "unloaded", "failed"]
    created: int
    context_length: int | None
    slots: int
    reason: str | None = None
    variants: Mapping[str, Variant] = field(default_factory=dict)
    is_local: bool = True
    local_only: ModelInfo | None = None


class ModelLoader(Protocol):
    """What the proxy needs of whoever runs the instances."""

    def models(self) -> Sequence[ModelInfo]:
        """Return every configured model, in the order of the settings."""

    async def ensure_ready(self, model: str) -> None:
        """Return once an instance of the model is admitted; the caller sets the deadline.

        Raises:
            ProxyError: It will not be: Unavailable, UnknownModel or UpstreamFailed say why.
        """


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt that an instance has read ahead.

    Attributes:
        instance: The instance.
        tokens: How many tokens it computed.
        cached_tokens: How many it had already.
    """

    instance: str
    tokens: int
    cached_tokens: int


class PromptWarmer(Protocol):
    """Who has instances read prompts ahead, and keeps what they are to read at their next start."""

    def learns(self, model: str, /) -> bool:
        """Return whether openings of a model's conversations are learnt."""

    def learn(self, model: str, opening: SharedPrefix, /) -> None:
        """Hear that three more conversations of a model have begun alike; must not block."""

    async def warm(self, model: str, body: Mapping[str, Any], /) -> Sequence[PrefillResult]:
        """Have every instance of a model that is up read a prompt; clients come first.

        Args:
            model: Its id.
            body: A chat request.

        Raises:
            BadRequest: The body is no chat request, or an instance refused it.
            Unavailable: None is up, or one did not come to it.
        """
