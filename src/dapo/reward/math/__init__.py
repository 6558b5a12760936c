"""The math reward: mathematical equality of a response's final answer with the row's."""

CPU_LIMIT_S = 1.0
"""Processor time for one response, in seconds. Not wall time: a busy machine must not change a verdict."""
