"""What is set for one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from proxy.upstream.upstream import Node, Upstream

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """A machine whose models are served here too.

    Attributes:
        name: What it is called here.
        url: Where its pages are, without a slash at the end: `http://HOST:PORT`, also `https`, and
            with a path behind it where its pages have one before them.
        api_key: The key that it asks for; empty where it asks for none.
        models: Those of its models that are served here; empty for all.
        slots: Requests that it gets at once for each model, where it does not say itself; at
            least 1.
        is_spare: Whether new conversations go there only where nothing here has a slot free.
    """

    name: str
    url: str
    api_key: str = field(default="", repr=False)
    models: frozenset[str] = frozenset()
    slots: int = 4
    is_spare: bool = True

    def upstream(
        self, name: str, model: str, here: str, slots: int, aliases: tuple[str, ...] = ()
    ) -> Upstream:
        """Return a model of the node as an instance.

        Args:
            name: The name of the instance.
            model: What the node calls the model.
            here: The id of the model that it serves here.
            slots: Requests that it gets at once.
            aliases: Other names of the model.
        """
        parts = urlsplit(self.url)
        return Upstream(
            name=name,
            model=here,
            slots=slots,
            socket=None,
            host=parts.hostname or "",
            port=parts.port or _PORTS[parts.scheme],
            api_key=self.api_key,
            aliases=aliases,
            node=Node(self.name, model, parts.path, parts.scheme == "https", self.is_spare),
        )
