"""Decoding: one step for every strategy, sampling on the device, teacher-forced scores. Pure; no thread or queue."""
