"""The machines of a run: launching, guarding and ending its ranks, here or on hosts. Knows nothing of Prefect.

::

    launch, guard       ranks of this machine; what guards any rank
    attempts/           one start of the ranks: its files, deadlines, exit records, and why it failed
    cluster/            the head of a run over hosts: hostfile, ssh, windows, fencing, logs
    node/               what the head has done on a host: python -m infra.node ACTION
    preflight/          what is asked of hosts before they train
    node_store/         disks of hosts that share none: staging, gathering, restoring
    node_local/         a run on such hosts, from what its ranks begin with to what they leave
    testcluster/        several hosts on one machine, for tests and trials
"""
