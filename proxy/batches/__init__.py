"""Files and batches of OpenAI's API, which outlive a connection and the daemon.

`jobs` (`Jobs`, the face of the package; `/v1/files`, `/v1/batches`), `runner`, `database`,
`own_requests` (requests without a client's connection).
"""
