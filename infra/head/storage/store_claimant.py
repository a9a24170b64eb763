"""What this head presents to claim the bucket of a run."""

import json

from infra.node.processes import boot_id
from t5train.checkpoint.resume import config_text
from t5train.errors import SpecError
from t5train.files.presence import ABSENT, reading
from t5train.files.run_folder import RUN
from t5train.release.checkpoint_store.store_claim import Claimant
from t5train.spec import RunSpec


def claimant(spec: RunSpec) -> Claimant:
    """Return what this head presents. For a run that has not begun, it has no identity."""
    path = spec.run_folder / RUN
    try:
        with reading(path):
            run = dict(json.loads(path.read_bytes()))
    except ABSENT:
        run = {}
    except ValueError as error:
        raise SpecError(f"{path} is damaged ({error}). Restore the file, or choose another --name") from error
    return Claimant(
        run=run,
        config=config_text(spec),
        root=str(spec.storage.root.resolve()),
        boot_id=boot_id(),
        lease_seconds=spec.cluster.lease_seconds,
    )
