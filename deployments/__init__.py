"""Deployments, pools and schedules of the flows."""
