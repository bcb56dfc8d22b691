"""Who may send requests: API keys, rate limits, Host and Origin."""
