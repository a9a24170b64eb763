"""The command line: a module for each command or group of commands, options, and terminal output.

Not here: code that flows import (``flows``), and what a stage does (``t5train``).
"""
