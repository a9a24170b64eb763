"""One start of a run's ranks: process guards and their watchdogs, leases, the run lock, exit records and logs.

Not here: what a rank itself writes (``t5train.files.heartbeat``), and the decision when to start or end
ranks (``infra.head.launch``).
"""
