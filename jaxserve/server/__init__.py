"""HTTP: the OpenAI-shaped service in front of an engine. Nothing under this package imports JAX."""
