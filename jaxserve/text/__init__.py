"""Text in and out of token ids: tokenizers, incremental decoding and chat templates. No jax, no HTTP, no engine."""
