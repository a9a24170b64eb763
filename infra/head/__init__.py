"""Everything that runs on the head. Start reading in ``training_run``.

Not here: what runs on a machine with ranks (``infra.node``), and what a stage does (``t5train``).
"""
