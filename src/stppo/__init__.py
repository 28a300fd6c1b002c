"""Companion to arXiv 2511.20718: off-policy RL of multi-turn search agents."""
