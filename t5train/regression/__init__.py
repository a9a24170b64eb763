"""The nightly regression: its cases, what was measured in a night, baselines, findings and the history.

Not here: running the cases and removing old nights (infra.head.regression), showing them in Prefect
(tasks.regression_tasks).
"""
