"""Configuration for Prefect: ``prefect.yaml`` with deployments, schedules and automations.

``systemd/`` has units that run a team's server and workers.

Not here: code. ``flows.deployment`` applies the file, and the deployments execute flows such as ``flows.pretrain``.
"""
