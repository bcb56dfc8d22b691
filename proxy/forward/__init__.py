"""Sends a request to an instance and its response to the client.

`forward` (`Forward`), `relay`, `response` (`ClientResponse`), `anthropic`, `openai_responses`,
`assemblers` (a whole response out of a stream), `arrays`, `prefill`, `second_request`, `fallback`.
"""
