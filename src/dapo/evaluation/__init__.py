"""Held-out rows: benchmarks, statistics, early stopping."""
