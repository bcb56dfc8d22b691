"""Which node is which process: no machine counts twice, and none counts itself."""

from __future__ import annotations

import secrets
from typing import Final

_RANDOM_BYTES: Final = 12


class NodeProcesses:
    """`own` is the process of this llama-corral, by a random word."""

    def __init__(self) -> None:
        self.own = secrets.token_hex(_RANDOM_BYTES)
        self._nodes: dict[str, str] = {}

    def claim(self, process: str, node: str) -> str | None:
        """Note the process of a node; return why it is left out, or None."""
        if not process:
            return None
        if process == self.own:
            return "it is this llama-corral itself"
        if self._nodes.get(process, node) == node:
            self.release(node)
            self._nodes[process] = node
            return None
        return f"it is the same as {self._nodes[process]}"

    def release(self, node: str) -> None:
        """Note that a node is down, or gone."""
        self._nodes = {process: one for process, one in self._nodes.items() if one != node}
