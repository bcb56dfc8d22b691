"""Sends a request to an instance and its response to the client.

`forward` (`Forward`) leases, sends and retries; `relay` (`plan_request`, `ResponseRelay`) relays;
`response` (`ClientResponse`) writes to the client. `assemblers` reads responses; `anthropic`,
`openai_responses` and `translation` translate them. `arrays`, `prefill`, `second_request`,
`node_request`, `fallback` and `capture` handle special requests.
"""
