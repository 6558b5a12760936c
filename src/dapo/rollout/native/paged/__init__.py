"""Rollout over a paged cache: what the native engine runs on a GPU."""
