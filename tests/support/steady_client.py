"""A client that notices every request that is not answered."""

import http.client
import json
import threading
import time

PATIENCE_S = 120


class SteadyClient(threading.Thread):
    """Sends one request after another until it is stopped, and keeps every answer but a 200."""

    def __init__(self, port: int, *, keep_alive: bool, key: str = "none") -> None:
        super().__init__(daemon=True)
        self._port = port
        self._keep_alive = keep_alive
        self._key = key
        self.is_stopped = False
        self.answered = 0
        self.slowest_s = 0.0
        self.failures: list[object] = []

    def run(self) -> None:
        connection = self._connect()
        while not self.is_stopped:
            if not self._keep_alive:
                connection.close()
                connection = self._connect()
            try:
                self._ask(connection)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                connection = self._connect()
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        began_at_s = time.monotonic()
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_at_s)
        self.answered += 1
        if answer.status != 200:
            self.failures.append((answer.status, text))
