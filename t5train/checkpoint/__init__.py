"""Checkpoints: sidecars, tags, retention, resuming, resharding, and saving and loading with a live engine.

Not here: moving them between hosts (``infra.head.storage``).
"""
