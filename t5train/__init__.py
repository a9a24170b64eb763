"""The library: from text to a published T5 checkpoint. It does not depend on Prefect, hosts or ssh."""
