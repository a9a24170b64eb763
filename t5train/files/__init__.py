"""Files on this machine: atomic writes, locks and ownership, what exists, folders of runs and stages, ranks' reports.

Not here: URLs (``t5train.records.locations``), and what the files of a stage mean (``t5train.records``). Standard
library only, as nodes import it.
"""
