"""Text to a published T5 checkpoint: the library. It knows nothing of Prefect, hosts or ssh."""
