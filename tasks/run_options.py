"""The options of every flow and task. Prefect takes those that are left out from the user's settings or the server's.

A user may want other flows to be retried, or to store their results. Here, a failure is final unless the library says
that it is transient, and results are verified files of the library.
"""

import os
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE

_OF_BOTH: dict[str, Any] = {
    "retries": 0,
    "retry_delay_seconds": 0,
    "log_prints": False,
    "persist_result": False,
    # Nothing is stored. Without a place, Prefect would look for the user's and the server's default place, and fail if
    # that block does not exist.
    "result_storage": Path(os.devnull),
    "result_serializer": "pickle",
    "cache_result_in_memory": True,
    "timeout_seconds": None,
}

FLOW_OPTIONS: dict[str, Any] = _OF_BOTH | {"validate_parameters": True}
TASK_OPTIONS: dict[str, Any] = _OF_BOTH | {"cache_policy": NO_CACHE, "refresh_cache": False}
