"""Processes on machines: launching, guarding and ending them. Knows nothing of Prefect."""
