"""Configuration for Prefect: ``prefect.yaml`` with one deployment per recipe, its work pool, and its schedules.

Not here: code. ``flows.deploy`` applies this file, and the deployments execute ``flows.pretrain``.
"""
