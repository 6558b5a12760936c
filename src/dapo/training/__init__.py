"""Packed batches, the update, its memory and its state on disk. Knows neither prompts nor rewards."""
