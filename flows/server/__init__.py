"""Prefect servers: embedded in ``run`` and ``up``, or a team's; their keys, and the profile that leads clients there.

Not here: what is deployed on them (``flows.deployment``), and what executes runs (``flows.workers``).
"""
