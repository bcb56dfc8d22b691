"""End an engine by SIGABRT while it answers: two seconds after its first answer has begun.

Words: the process, and the words of its command line, with the socket that it listens on. The key
is in the environment, as the engine has it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Final

import httpx

GOES_ON_S: Final = 2.0
POLL_S: Final = 0.02


def main() -> None:
    pid, words = int(sys.argv[1]), sys.argv[2:]
    host = words[words.index("--host") + 1]
    headers = {"Authorization": f"Bearer {os.environ['LLAMA_API_KEY']}"}
    transport = httpx.HTTPTransport(uds=host)
    with httpx.Client(transport=transport, base_url="http://localhost", headers=headers) as client:
        wait_answering(client)
        time.sleep(GOES_ON_S)
        wait_answering(client)
        os.kill(pid, signal.SIGABRT)


def wait_answering(client: httpx.Client) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            slots = client.get("/slots").json()
            if any(is_decoding(slot) for slot in slots):
                return
        except (httpx.HTTPError, ValueError, AttributeError, TypeError):
            pass  # it loads
        time.sleep(POLL_S)
    sys.exit()


def is_decoding(slot: dict[str, object]) -> bool:
    tokens = slot.get("next_token")
    found = tokens[0] if isinstance(tokens, list) and tokens else tokens
    decoded = found.get("n_decoded", 0) if isinstance(found, dict) else 0
    return bool(slot.get("is_processing")) and int(decoded) > 5


if __name__ == "__main__":
    main()
