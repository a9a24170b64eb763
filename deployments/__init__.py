"""What Prefect is told: ``prefect.yaml`` with the work pool, one deployment per recipe, and their schedules.

Not here: code. ``flows.deploy`` applies this file, and ``flows.pretrain`` is what the deployments execute.
"""
