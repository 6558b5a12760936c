"""The engine: prompts into samples with log-probabilities and policy versions. Knows no reward."""
