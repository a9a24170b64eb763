"""Files of this machine: atomic writes, locks, what is there, and the names of what lies in a run's folder.

Not here: URLs (``t5train.locations``), and what the files of a stage mean (``t5train.records``). Standard library
only, as nodes import it.
"""
