"""Reward models: a trained network scores (prompt, response). The only rewards that know tensors."""

from dapo.reward.model.scorer import ModelScorer

__all__ = ["ModelScorer"]
