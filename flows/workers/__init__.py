"""What executes a server's runs on this machine: the worker, and its run monitor with records of running processes.

Not here: how a run trains (``flows.pretrain``, and below it ``tasks`` and ``infra``).
"""
