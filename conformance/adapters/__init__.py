"""Adapters for two trainers: dapo itself and the GRPOTrainer of TRL."""
