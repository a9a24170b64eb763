"""The command line: a module for each command or group of commands, options, and terminal output.

Code that flows import is in ``flows``.
"""
