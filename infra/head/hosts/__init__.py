"""The hosts of a run: which they are, how the head connects to them, and what it asks them to run."""
