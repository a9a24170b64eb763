"""The Prefect flow, which chains the stages of a run; its server, worker and profile; and records of flow runs.

Start reading in ``pretrain``. Not here: what a stage does (``t5train``), and the command line (``flows.cli``), which no
flow imports.
"""
