"""A checkpoint to a published model, as Prefect tasks: one library call each.

Weights and export lie in the run's own folder and can be made again from its checkpoint, so damaged ones are moved
aside. A checkpoint or a publication never is.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from t5train import run_files
from t5train.atomic import write_json
from t5train.certify import certify_in_fresh_process
from t5train.derived import set_damaged_aside
from t5train.export import export
from t5train.fingerprint import fingerprint
from t5train.os_errors import as_storage_errors
from t5train.publish import publish
from t5train.records import Checkpoint, Export, Publication, TokenizerFiles, Weights
from t5train.spec import RunSpec
from tasks.stage_progress import StageProgress


@task(name="consolidate", cache_policy=NO_CACHE)
@as_storage_errors()
def consolidate_weights(spec: RunSpec, checkpoint: Checkpoint) -> Weights:
    """Join the ranks' parts of the fp32 masters to safetensors."""
    from t5train.consolidate import consolidate  # brings torch, which a flow that reuses everything does without

    # Named by content: should a GPU train the last steps once more, their bytes may differ.
    content = fingerprint({name: digest.sha256 for name, digest in checkpoint.files.items()})
    out = spec.run_folder / run_files.WEIGHTS / f"{checkpoint.tag}-{content[:12]}"
    checkpoints = spec.run_folder / run_files.CHECKPOINTS
    set_damaged_aside(out)
    return consolidate(checkpoints, out, tag=checkpoint.tag, progress=StageProgress("consolidate"))


@task(name="export", cache_policy=NO_CACHE)
@as_storage_errors()
def export_model(spec: RunSpec, weights: Weights, tokenizer: TokenizerFiles) -> Export:
    """Write the Hugging Face folder."""
    witness, out = spec.run_folder / run_files.WITNESS_FOLDER, spec.run_folder / run_files.EXPORT
    set_damaged_aside(out)
    return export(weights, tokenizer, witness, spec, out, StageProgress("export"))


@task(name="certify", cache_policy=NO_CACHE)
@as_storage_errors()
def certify_export(spec: RunSpec, exported: Export) -> Export:
    """Let a fresh process prove that the export is the model that was trained."""
    return certify_in_fresh_process(exported, spec.run_folder / run_files.WITNESS_FOLDER, StageProgress("certify"))


@task(name="publish", cache_policy=NO_CACHE)
@as_storage_errors()
def publish_export(spec: RunSpec, exported: Export, url: str) -> Publication:
    """Put the certified export where others find it, its manifest last; the run notes where."""
    publication = publish(exported, url, StageProgress("publish"))
    note = {"url": publication.url, "fingerprint": publication.fingerprint}
    write_json(spec.run_folder / run_files.PUBLISHED, note)
    return publication
