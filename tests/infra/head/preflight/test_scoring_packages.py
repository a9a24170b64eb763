"""A run that chooses its best checkpoint by generated text needs the packages that score it, everywhere, at first."""

import sys
from dataclasses import replace

import pytest

from infra.head.preflight.checklist import judge
from infra.head.preflight.run_checks import require_possible
from infra.node.inspection.software import SCORING
from t5train.errors import InputError
from t5train.spec.recipes import recipe
from tests.support.host_facts import HOSTS, NONCE, REQUIREMENTS, SOFTWARE, reply, with_


def test_this_machine_needs_the_packages_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = recipe("reverse_and_sort")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    require_possible(spec)
    with pytest.raises(InputError, match=r"^scores need sacrebleu and rouge-score, .*Install t5-pretrain\[score\]$"):
        require_possible(spec.with_settings({"evaluate.best_metric": "validation_chrf"}))


def test_every_host_needs_the_heads_versions() -> None:
    def found(versions: dict[str, str]) -> list[str]:
        packages = {host: SOFTWARE.packages | dict.fromkeys(SCORING, version) for host, version in versions.items()}
        replies = reply({host: with_("software", packages=each) for host, each in packages.items()})
        head = replace(SOFTWARE, packages=SOFTWARE.packages | dict.fromkeys(SCORING, "2.6.0"))
        return [f"{each.check}: {each.text}" for each in judge(replies, REQUIREMENTS, head, NONCE).findings]

    assert not found(dict.fromkeys(HOSTS, "2.6.0"))
    lacking = found(dict.fromkeys(HOSTS, "2.6.0") | {"node1": "", "node3": ""})
    assert len(lacking) == len(SCORING)
    assert lacking[0] == (
        "packages: node1, node3: sacrebleu missing, the head has 2.6.0, and evaluate.best_metric is a score of "
        "generated text. Install t5-pretrain[score] with sacrebleu==2.6.0 there, or set "
        "evaluate.best_metric=validation_loss"
    )
