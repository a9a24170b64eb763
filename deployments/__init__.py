"""Configuration for Prefect: ``definitions.yaml`` with queues, deployments and schedules.

``systemd/`` has units that run a team's server and workers.

Not here: code. ``flows.deployment`` applies the file, and the deployments execute flows such as ``flows.pretrain``.
"""
