"""Actions that the head runs on a host. Standard library only, so that they start quickly."""
