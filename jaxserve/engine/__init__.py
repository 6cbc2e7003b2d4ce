"""Continuous batching: requests of token ids in, deltas of token ids out. No HTTP, no text, no checkpoint."""
