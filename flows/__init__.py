"""The Prefect flow, which chains the stages of a run, its parameters, and how it is deployed, served and executed.

Start reading in ``pretrain``. Not here: what a stage does (``t5train``), and the command line (``flows.cli``), which no
flow imports.
"""
