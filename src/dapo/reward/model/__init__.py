"""Reward models: a trained network scores (prompt, response). The only rewards that know tensors."""
