"""Prefect flows and the console script."""
