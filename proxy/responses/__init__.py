"""OpenAI's Responses API as its client libraries expect it, on top of the engine's."""
