"""Files on this machine: atomic writes, locks, checks of what exists, folders of runs and stages, and ranks' reports.

Not here: URLs (``t5train.records.locations``), and what the files of a stage mean (``t5train.records``). Standard
library only, as nodes import it.
"""
