"""Which requests are accepted: API keys, rate limits, Host and Origin."""
