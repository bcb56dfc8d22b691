"""Jobs that outlive a connection: OpenAI's Files and Batches, stored in SQLite."""
