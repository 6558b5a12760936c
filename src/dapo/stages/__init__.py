"""Stages of training other than reinforcement learning, on the same trainer."""
