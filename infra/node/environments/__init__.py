"""Makes an environment on a host from wheels that the head sends. The head sends these modules, too, as one program.

Standard library only, and no imports except from each other (infra.head.environments.environment_installation sends
them in order). Not here: what hosts are asked to install (``infra.head.environments``).
"""
