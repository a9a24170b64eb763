"""``data index``: checks a FAISS index against the embeddings of a text, and finds near-duplicates through one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import JsonOption, PlotOption, RootOption, require_writable_names, root_of, write_plot
from flows.cli.terminal import say, show_json, show_rows, show_table, stage_display
from t5train.data.checks.unchanged_files import content_of, digests_of, stamps_of
from t5train.data.readers import rows
from t5train.data.sources import local_files
from t5train.data.vectors.embeddings import embeddings_of, require_embeddings
from t5train.data.vectors.faiss_indexes import built_index, chosen_index, faiss_module, local_index
from t5train.data.vectors.index_check import Sample, check_index, given_index, recall_record
from t5train.data.vectors.near_duplicates import Thresholds, find_near_duplicates
from t5train.errors import InputError
from t5train.records.locations import local_folder, redacted
from t5train.report.vectors_report import (
    CHECK_COLUMNS,
    check_rows,
    index_lines,
    index_values,
    near_duplicate_rows,
    near_duplicate_values,
    recall_plot,
    similarity_plot,
)

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Text with embeddings: a folder, pattern or URL of .parquet files, or wiki_dpr",
        show_default=False,
    ),
]
RevisionOption = Annotated[
    str, typer.Option("--revision", help="Your name for this state of the text", show_default=False)
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Decides what is sampled")]


def check(  # noqa: PLR0913, PLR0917 - one for each option
    source: SourceArgument,
    index: Annotated[
        str,
        typer.Option(
            "--index", help="Path or URL of the index; of wiki_dpr also exact or compressed", show_default=False
        ),
    ],
    revision: RevisionOption = "",
    root: RootOption = None,
    queries: Annotated[int, typer.Option(min=1, max=100_000, help="Embeddings to search for")] = 256,
    neighbours: Annotated[int, typer.Option(min=1, max=1000, help="Nearest neighbours of each (k)")] = 10,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that an index has the embeddings of a text, and finds as many of their exact neighbours as before.

    All embeddings are read once. The exit code is 1 if a check fails.
    """
    require_writable_names(plot=plot)
    sample, folder = Sample(queries, neighbours, seed), root_of(root)
    faiss_module()
    chosen = chosen_index(source, index)
    record = recall_record(folder, _identity(source), revision, redacted(chosen.location), sample)
    with stage_display() as progress:
        require_embeddings(source, revision, folder)
        path = local_index(chosen, revision, folder, progress)  # first, as its size may be known before the download
        embeddings = embeddings_of(local_files(source, revision, folder, progress, whole_files=True))
        report = check_index(path, chosen.known, embeddings, sample, record, progress=progress)
    write_plot(plot, lambda: recall_plot(report))
    if as_json:
        show_json(index_values(report))
    else:
        show_table(CHECK_COLUMNS, check_rows(report))
        for line in index_lines(report):
            say(line)
    if not report.passed:
        raise typer.Exit(1)


def duplicates(  # noqa: PLR0913, PLR0917 - one for each option
    source: SourceArgument,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Write the pairs to this file (.jsonl)", show_default=False),
    ],
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            help="Path or URL of an index of the source; of wiki_dpr also exact or compressed",
            show_default="one is built in memory",
        ),
    ] = None,
    revision: RevisionOption = "",
    root: RootOption = None,
    neighbours: Annotated[int, typer.Option(min=1, max=1000, help="Neighbours of each passage to compare")] = 10,
    cosine: Annotated[
        float, typer.Option(min=-1.0, max=1.0, help="Compare texts whose embeddings have at least this cosine")
    ] = 0.9,
    text_similarity: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Near-duplicates have at least this similarity of their texts")
    ] = 0.8,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find passages that are nearly the same: embeddings propose pairs, and an exact similarity of texts decides.

    The similarity is the share of runs of five words that both texts have (Jaccard index). To remove such passages from
    training, set corpus.remove_listed to the file.
    """
    require_writable_names(out=out, plot=plot)
    thresholds, folder = Thresholds(neighbours, cosine, text_similarity), root_of(root)
    faiss_module()
    chosen = None if index is None else chosen_index(source, index)
    about: dict[str, Any] = {
        "source": redacted(source),
        "revision": revision,
        "index": chosen and redacted(chosen.location),
    }
    with stage_display() as progress:
        require_embeddings(source, revision, folder)
        path = None if chosen is None else local_index(chosen, revision, folder, progress)
        embeddings = embeddings_of(local_files(source, revision, folder, progress, whole_files=True))
        next(rows(embeddings.files[0].source), None)  # raises an error if there is no column of texts
        searched = (
            built_index(embeddings, seed, progress=progress) if path is None else given_index(path, embeddings, seed)
        )
        sources = [each.source for each in embeddings.files]
        stamps = stamps_of(sources)
        about["files"] = content_of(digests_of(sources, progress))
        result = find_near_duplicates(embeddings, searched, thresholds, out.absolute(), about=about, progress=progress)
        if stamps_of(sources) != stamps:
            out.unlink()
            raise InputError(
                f"a file of {redacted(source)} was changed during the search, so its pairs may be of two states of the "
                "text. Start again, and leave the files as they are until the search ends"
            )
    write_plot(plot, lambda: similarity_plot(result, thresholds))
    if as_json:
        show_json({"out": str(out.absolute()), **near_duplicate_values(result, thresholds)})
        return
    show_rows(near_duplicate_rows(result))
    say(f"pairs: {out}")


def _identity(source: str) -> str:
    """Return the name of a source that is the same from each current folder."""
    path = local_folder(source)
    return redacted(source) if path is None or not path.exists() else str(path)
