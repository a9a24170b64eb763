"""Commands for those who operate: servers, workers, deployments, the nightly regression, and unneeded files.

Not here: commands for one's own runs (``flows.cli`` and ``flows.cli.runs``).
"""
