"""The console script: a module for each command or group of commands, options, and terminal output.

Not here: anything that a flow imports (``flows``).
"""
