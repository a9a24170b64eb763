"""Prefect tasks, one per library call, and what Prefect shows of them: progress, results, log lines.

Not here: what the stages do (``t5train``), and how ranks are started (``infra``).
"""
