"""Files on this machine: atomic writes, locks, checks of what exists, a run's files, and the folders of data stages.

Not here: URLs (``t5train.locations``), and what the files of a stage mean (``t5train.records``). Standard library
only, as nodes import it.
"""
