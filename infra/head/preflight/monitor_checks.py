"""Checks, before anything starts, that Weights & Biases can get the metrics of a run.

The API key is only looked for; it is never read into a setting, a file or a message.
"""

import netrc
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from t5train.checkpoint.resume import has_finished
from t5train.errors import SpecError
from t5train.spec import RunSpec

API_KEY = "WANDB_API_KEY"
_SERVER = "https://api.wandb.ai"
_VARIABLES = (
    *(API_KEY, "WANDB_BASE_URL", "WANDB_ENTITY", "NETRC"),
    *("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
)
_OFFLINE = "or set monitor.wandb_mode=offline and send the metrics later with `wandb sync`"


def require_wandb(spec: RunSpec) -> None:
    """Raise SpecError if the run is to send metrics to W&B, but the package or the login is missing.

    On hosts, the preflight looks for the package.
    """
    monitor, on_hosts = spec.monitor, spec.cluster.hostfile is not None
    if not monitor.wandb or has_finished(spec):
        return
    if not on_hosts and find_spec("wandb") is None:
        raise SpecError(
            "monitor.wandb is true, but the package wandb is not installed. Install it: "
            f"{shlex.quote(sys.executable)} -m pip install 'wandb>=0.31,<0.32', or set monitor.wandb=false"
        )
    if monitor.wandb_mode == "offline":
        return
    if on_hosts and not (API_KEY in spec.cluster.environment and os.environ.get(API_KEY)):
        raise SpecError(
            f"monitor.wandb_mode is online, but the host of rank 0 would get no API key. Set {API_KEY} here and pass "
            f"it on with cluster.environment='[\"{API_KEY}\"]', {_OFFLINE}"
        )
    if not on_hosts and not _is_logged_in(os.environ):
        raise SpecError(
            f"monitor.wandb_mode is online, but there is no API key for {_host(os.environ)}. Set {API_KEY}, log in "
            f"with `wandb login`, {_OFFLINE}"
        )


def wandb_environment(spec: RunSpec) -> dict[str, str]:
    """Return the variables that W&B needs, for ranks on this machine, which otherwise get no secrets."""
    if not spec.monitor.wandb or spec.monitor.wandb_mode == "offline":
        return {}
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    """Whether wandb would find an API key: in the variable, or in the file that `wandb login` writes."""
    if environment.get(API_KEY):
        return True
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(_host(environment))
    except (OSError, netrc.NetrcParseError):
        return False
    return found is not None and bool(found[2])


def _host(environment: Mapping[str, str]) -> str:
    return urlsplit(environment.get("WANDB_BASE_URL") or _SERVER).netloc
