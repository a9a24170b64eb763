"""The machines of a run: launching, supervising and ending its ranks, on this machine or on hosts. Without Prefect.

Not here: Prefect (``flows``, ``tasks``), and what ranks compute (``t5train``).

::

    head/           the machine that orchestrates; start reading in head/training_run.py
        hosts/      which hosts, and the way to them: hostfile, ssh, sent code
        preflight/  what is checked before a launch
        launch/     ranks started, supervised and ended; why an attempt failed
        storage/    files of a run between the head and nodes
    node/           everything that runs on a machine with ranks: python -m infra.node ACTION
        attempts/   one start of its ranks: guard, watchdog, leases, locks, logs
        inspection/ facts for preflight
        storage/    this node's own disk
    testcluster/    several hosts on one machine, for tests and trials
"""
