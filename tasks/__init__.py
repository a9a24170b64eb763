"""Prefect tasks, each of which makes one call of the library, and how Prefect shows them: progress, results, log.

Not here: anything that is usable without Prefect (``t5train``, ``infra``).
"""
