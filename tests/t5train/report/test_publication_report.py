"""The report on a publication names its location exactly, as text and in commands."""

from pathlib import Path

from t5train.records.stage_records import Publication
from t5train.report.publication_report import publication_report


def test_the_location_is_shown_as_it_is(tmp_path: Path) -> None:
    url = "s3://models/_t5_`x`"
    published = Publication(path=tmp_path, fingerprint="d" * 64, files={}, url=url).sealed()
    report = publication_report(published, "mine")
    assert "\npublished: s3://models/\\_t5\\_\\`x\\`\n" in report
    assert f"\nt5-pretrain verify '{url}'\n" in report
    assert f"\nt5-pretrain fetch '{url}' mine\n" in report
