"""Launches, supervises and ends the ranks of a run, on this machine or on hosts.

Not here: Prefect (``flows``, ``tasks``), and what ranks compute (``t5train``).

::

    head/           the machine that orchestrates; start reading in head/training_run.py
        hosts/      connects to hosts: hostfile, ssh, shipped code
        environments/  collects wheels, and installs them on hosts without internet access
        preflight/  checks the run and its hosts before a launch
        launch/     starts, supervises and ends ranks; finds out why an attempt failed
        storage/    moves files of a run between the head and nodes
        runs/       reads what has become of runs, and deletes one
        regression/ trains small cases every night and compares them with a baseline
    node/           everything that runs on a machine with ranks: python -m infra.node ACTION
        attempts/   one start of its ranks: guard, watchdog, leases, locks, logs
        inspection/ collects the facts that preflight evaluates
        storage/    this node's own disk
    testcluster/    several hosts on one machine, for tests and trials
"""
