"""The SGLang engine: server process, HTTP client, weight update. Nothing heavy is imported here."""
