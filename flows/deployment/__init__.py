"""What a server offers to run: definitions, their defaults, and notifications; and how they are applied to it.

Not here: the definitions themselves, which are data (``deployments``), and the parameters of a run
(``flows.run_parameters``).
"""
