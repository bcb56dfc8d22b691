"""Sends a request to an instance and its response to the client.

`forward` (`Forward`) leases, sends and retries; `relay` (`plan_request`, `ResponseRelay`) relays;
`response` (`Response`, `ClientResponse`) writes to the client, through each `StreamTransform`:
`anthropic`, `openai_responses`, `second_request`, `tool_calls`, `inspection` (explanation and
capture). `assemblers` reads responses. `arrays` and `prefill` handle special requests.
"""
