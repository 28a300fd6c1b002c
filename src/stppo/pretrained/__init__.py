"""Pretrained models brought into the cache; nothing of the core imports it."""
