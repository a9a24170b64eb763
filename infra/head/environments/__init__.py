"""Environments for hosts without internet access: collects wheels on the head, and installs them on hosts over ssh.

Not here: what runs on the host to install them (``infra.node.environment_installer``), and checks whether the installed
packages fit a run (``infra.head.preflight``).
"""
