"""Reward models: a trained network scores (prompt, response). The only part of the rewards that knows tensors."""

from dapo.reward.model.scorer import ModelScorer

__all__ = ["ModelScorer"]
