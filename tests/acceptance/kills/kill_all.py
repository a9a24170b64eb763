"""Kill real processes at random moments of saving, gathering, consolidating and publishing.

::

    python -m tests.acceptance.kills.kill_all                     fifty of each
    python -m tests.acceptance.kills.kill_all --kills 3 --seed 1
    python -m tests.acceptance.kills.kill_all --recipe reverse_and_sort             of a run on pairs
    python -m tests.acceptance.kills.kill_all --recipe reverse_and_sort --lora      of one that trains adapters

Two DeepSpeed ranks train a small T5 on two hosts, and save after every step. The hosts are folders of this machine; the
head talks to them with the protocol that it uses over ssh. The seed decides the moments, between 0 and the time that
the stage takes when nobody is killed. After each kill, hosts and head together, and the head alone, must choose the
newest complete tag, as judged with json and sha256 alone. No tag that was complete may be lost. Repeating the stage
must give the same bytes as when nobody is killed. If any of this does not hold, the command prints it and fails.
"""

import argparse
import logging
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from infra.node.compiled_operators import clear_stale_locks
from infra.node.operator_folder import VARIABLE, operator_folder
from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.resume import conclude, open_run
from t5train.records.stage_records import Export, TokenizerFiles
from t5train.release.certification import certify_in_fresh_process
from t5train.release.export import export
from tests.acceptance.kills.kill_saves import different_saves, finish, kill_saves, train_undisturbed
from tests.acceptance.kills.kill_site import RECIPES, Site, make_site
from tests.acceptance.kills.kill_stages import ConsolidateTrial, GatherTrial, PublishTrial, contents, kill_stage
from tests.acceptance.kills.kill_tally import HEADER, Tally

# Set this before anything asks for an accelerator. Each rank has one core.
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": "0"}
# These ranks have no guard that would set it. A rank that is killed while it compiles leaves a lock behind.
os.environ[VARIABLE] = str(operator_folder())


def train_with_kills(site: Site, folder: Path, seed: int, kills: int) -> Tally:
    """Train the run to its end, with kills during saves."""
    seconds, saved = train_undisturbed(open_site(site.in_folder(folder / "undisturbed")))
    tally = Tally("save", seconds, seed)
    kill_saves(open_site(site), saved, tally, kills)
    finish(site)
    tally.record_faults("at the end", {"different result": different_saves(site, saved)})
    print(tally.row(), flush=True)
    return tally


def certify_run(site: Site, tag: str, tokenizer: TokenizerFiles, folder: Path) -> Export:
    """Consolidate, export and certify a checkpoint without kills."""
    start, witness = site.spec.model.start_from, site.run.folder / "witness"
    weights = consolidate(site.checkpoints, folder / "weights", tag=tag, start_from=start)
    exported = export(weights, tokenizer, witness, site.spec, folder / "export")
    return certify_in_fresh_process(exported, witness, start_from=start)


def kill_all(folder: Path, seed: int, kills: int, recipe: str, *, lora: bool) -> list[Tally]:
    """Run the stages in order, each on the results of the previous one; return their tallies."""
    site, tokenizer = make_site(folder, recipe, num_steps=3 * kills + 6, lora=lora)
    tallies, trial = [train_with_kills(site, folder, seed, kills)], folder / "trial"
    tallies.append(kill_stage("gather", seed, kills, trial, lambda into: GatherTrial(site, into)))
    site.storage.take_home()
    tag = conclude(site.spec, site.shards).tag
    exported = certify_run(site, tag, tokenizer, folder)
    before = contents(site.checkpoint_folders)
    consolidating = partial(ConsolidateTrial, site, tag, before)
    tallies.append(kill_stage("consolidate", seed, kills, trial, consolidating))
    before = contents([exported.path])
    for to_store, stage in ((False, "publish, to a folder"), (True, "publish, to a store")):
        publishing = partial(PublishTrial, site, exported, before, to_store=to_store)
        tallies.append(kill_stage(stage, seed, -(-kills // 2) if to_store else kills // 2, trial, publishing))
    return tallies


def open_site(site: Site) -> Site:
    """Begin the site's run, and return the site."""
    open_run(site.spec, site.shards)
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", choices=RECIPES, default="smoke")
    parser.add_argument("--lora", action="store_true", help="train adapters of a random model, on the recipe's pairs")
    arguments = parser.parse_args()
    clear_stale_locks()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        tallies = kill_all(Path(folder), arguments.seed, arguments.kills, arguments.recipe, lora=arguments.lora)
    print(HEADER + "\n".join(tally.row() for tally in tallies))
    for tally in tallies:
        if late := tally.drawn - len(tally.moments):
            print(f"{tally.stage}: {late} kills came after the end of the stage and were drawn again")
        if tally.partly_removed:
            print(f"{tally.stage}: {tally.partly_removed} kills left a partly removed folder, which gc removes")
    sys.exit(any(tally.faults for tally in tallies))


if __name__ == "__main__":
    main()
