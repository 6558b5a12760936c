"""The math reward: mathematical equality of a response's final answer with the row's."""

CPU_LIMIT_S = 1.0
"""Processor time in user mode for one response, in seconds. No other: a busy machine must not change a verdict."""
