"""Commands for those who operate: servers, workers, deployments, hosts, the nightly regression, and removal of files.

Not here: commands that make, use or look at a model (``flows.cli``).
"""
