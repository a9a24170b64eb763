"""The commands ``status`` and ``rm``, and what they print.

Not here: what they read and delete (``infra.head.runs``), and the other commands (``flows.cli``).
"""
