"""Files and batches of OpenAI's API, which outlive a connection and the daemon.

`jobs` (`Jobs`, the face of the package; `/v1/batches`), `files_api`, `runner`, `database`,
`own_requests` (requests without a client's connection).
"""
