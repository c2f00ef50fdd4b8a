"""State that a row carries between steps: KV caches, built in one place."""
