"""Prefect tasks, one per library call, and what Prefect shows of them: progress, results, log lines.

Not here: anything that is usable without Prefect (``t5train``, ``infra``).
"""
