"""A sample of ``python -m tests.acceptance.kills.kill_all``: ranks that are killed while they save."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

KILLS = 2
# In a process of its own, because the ranks are forks of a server that has to see the command's environment first.
PROGRAM = f"""
import json, sys
from pathlib import Path
from tests.acceptance.kills.kill_all import open_site, train_undisturbed
from tests.acceptance.kills.kill_saves import kill_saves
from tests.acceptance.kills.kill_site import make_site
from tests.acceptance.kills.kill_tally import Tally

folder = Path(sys.argv[1])
site, _ = make_site(folder, "smoke", num_steps=3 * {KILLS} + 2, lora=False)
seconds, saved = train_undisturbed(open_site(site.in_folder(folder / "undisturbed")))
tally = Tally("save", seconds, seed=1)
kill_saves(open_site(site), saved, tally, {KILLS})
print(json.dumps([tally.drawn, tally.faults]))
"""


@pytest.mark.slow
def test_ranks_killed_while_they_save_lose_no_complete_checkpoint_and_resume_bit_equal(
    run_python: Callable[..., CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    done = run_python(PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    kills, faults = json.loads(done.stdout.splitlines()[-1])
    assert not faults
    assert kills >= KILLS
