"""Why a request took as long as it did, and why its prompt was not in the cache."""
