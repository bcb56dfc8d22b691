"""Files with keys, passed to the daemon as credentials of its service. Pure.

The manager reads them as root and shows a copy to the service alone, so they may belong to root.
Source: systemd.exec(5), `LoadCredential=`; systemd.unit(5), `%d`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from supervisor.service.unit_text import assignment, escaped
from supervisor.settings.schema import Settings

_API_KEYS = "api_keys"
_SLOTS_KEY = "slots_key"


def credential_lines(settings: Settings) -> Iterator[str]:
    """Load each file, and name its copy in the environment, which wins over the settings file."""
    if settings.proxy.api_keys_file is not None:
        yield f"LoadCredential={_API_KEYS}:{escaped(str(settings.proxy.api_keys_file))}"
        yield f"Environment={assignment('CORRAL_PROXY__API_KEYS_FILE', f'%d/{_API_KEYS}')}"
    if settings.supervisor.slots_key_file is not None:
        yield f"LoadCredential={_SLOTS_KEY}:{escaped(str(settings.supervisor.slots_key_file))}"
        yield f"Environment={assignment('CORRAL_SUPERVISOR__SLOTS_KEY_FILE', f'%d/{_SLOTS_KEY}')}"
    files = {name: node.key_file for name, node in settings.nodes.items() if node.key_file}
    for name, file in files.items():
        yield f"LoadCredential=node_{name}:{escaped(str(file))}"
    if files:
        nodes = {name: {"key_file": f"%d/node_{name}"} for name in files}
        yield f"Environment={assignment('CORRAL_NODES', json.dumps(nodes))}"
