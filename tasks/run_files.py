"""Names of files in a run's folder that more than one module knows."""

METRICS = "metrics.jsonl"
"""One JSON line a step."""

ATTEMPT_SPEC = "spec.json"
"""In the folder of an attempt: what its ranks are told."""

PUBLISHED = "published.json"
"""Where the run was published last."""
