"""What the proxy knows of one instance, and where it is reached.

A model on another machine is an instance too, of a node, which is reached over the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A unix socket has no name on the network; the engine wants some Host.
_UNIX_AUTHORITY = "localhost"


@dataclass(frozen=True, slots=True)
class Node:
    """What is particular to a model on another machine.

    Attributes:
        name: The node's name.
        model: What the node itself calls the model.
        prefix: What stands before every path there; empty or `/something`.
        is_tls: Whether it speaks HTTPS.
        is_spare: Whether new conversations go there only where nothing else has a slot free.
    """

    name: str
    model: str
    prefix: str = ""
    is_tls: bool = False
    is_spare: bool = True


@dataclass(frozen=True, slots=True)
class Upstream:
    """One instance that may be asked.

    Attributes:
        name: The instance's name, unique among all.
        model: The id of the model it serves.
        slots: Sequences it decodes at once, at least 1.
        socket: Path of its unix socket, or None where it listens on TCP.
        host: Its address where `socket` is None.
        port: Its TCP port where `socket` is None.
        api_key: The key that it asks for; empty where it asks for none.
        aliases: Other names of the model.
        can_name_slots: Whether a request may name a slot: its engine matches no prompts, and
            each slot has a cache of its own.
        tells_its_end: Whether `Router.ended` will be told how its process ended.
        node: The other machine it is on, or None: it is one of ours.
    """

    name: str
    model: str
    slots: int
    socket: str | None
    host: str
    port: int
    api_key: str = field(repr=False)
    aliases: tuple[str, ...] = ()
    can_name_slots: bool = False
    tells_its_end: bool = False
    node: Node | None = None

    @property
    def prefix(self) -> str:
        """Return what stands before every path there."""
        return self.node.prefix if self.node else ""

    @property
    def authority(self) -> str:
        """Return what a request to it says as its Host."""
        if self.socket:
            return _UNIX_AUTHORITY
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
