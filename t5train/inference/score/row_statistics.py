"""The metrics, and what each needs to know of a single row: numbers whose sums over any rows give the score of these.

They are whole numbers, so sums are exact, and the same in whatever order rows are added. Counts are those of sacrebleu.
ROUGE and token F1 are means of fractions, which are stored in units of 2 to the power of -30.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from t5train.errors import InputError
from t5train.progress import Progress

EXACT_MATCH, EXACT_SIGNATURE = "exact_match", "case:mixed|strip:ends"
_ONE = 1 << 30
_ROWS_AT_ONCE = 1000
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Metric(NamedTuple):
    """One or several scores that are computed together, from 0 to 100.

    ``of_rows`` takes hypotheses and references, and returns whole numbers [rows, columns]. ``score_of`` takes their
    sums [columns] and the number of rows, and returns the score of each name.
    """

    names: tuple[str, ...]
    signature: str
    columns: int
    of_rows: Callable[[Sequence[str], Sequence[str]], Any]
    score_of: Callable[[np.ndarray, int], Sequence[float]]


def metrics_of(resamples: int, seed: int) -> list[Metric]:
    """Return all metrics, with signatures that name the bootstrap, as sacrebleu's do.

    Raises InputError if sacrebleu or rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise InputError(
            f"scores need sacrebleu and rouge-score, but {error.name} cannot be imported ({error}). Install "
            "t5-pretrain[score]"
        ) from None
    from importlib.metadata import version

    rouge = f"measure:f1|stemmer:no|tokens:[a-z0-9]+|version:{version('rouge-score')}"
    of_sacrebleu = {"bleu": BLEU(force=True), "bleu_intl": BLEU(tokenize="intl", force=True), "chrf": CHRF()}
    return [
        *(_of_sacrebleu(name, metric, resamples, seed) for name, metric in of_sacrebleu.items()),
        Metric(_ROUGE, rouge, len(_ROUGE), partial(_rouge_rows, RougeScorer(_ROUGE), RougeScorer(_ROUGE[:-1])), _means),
        Metric((EXACT_MATCH,), EXACT_SIGNATURE, 1, _exact_rows, _means),
        Metric(("token_f1",), "case:lc|punctuation:no|articles:no|split:spaces", 1, _f1_rows, _means),
    ]


def _of_sacrebleu(name: str, metric: Any, resamples: int, seed: int) -> Metric:
    """Wrap a metric of sacrebleu. Only its private methods give the statistics of rows, and the score of their sums."""
    metric.num_refs, metric.n_bootstrap, metric.seed = 1, resamples, seed
    return Metric(
        (name,),
        metric.get_signature().format(),
        len(metric._extract_corpus_statistics([""], [[""]])[0]),
        lambda hypotheses, references: metric._extract_corpus_statistics(hypotheses, [references]),
        lambda sums, _: [float(metric._compute_score_from_stats(sums).score)],
    )


def statistics_of(
    metrics: Sequence[Metric], hypotheses: Sequence[str], references: Sequence[str], progress: Progress
) -> np.ndarray:
    """Return the statistics of all rows for all metrics side by side: float64 [rows, columns], whole numbers."""
    blocks = []
    for start in range(0, len(hypotheses), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found = [np.array(each.of_rows(hypotheses[rows], references[rows]), np.float64) for each in metrics]
        blocks.append(np.hstack(found))
        progress("rows compared with their references", min(rows.stop, len(hypotheses)), len(hypotheses))
    return np.concatenate(blocks)


def scores_of(metrics: Sequence[Metric], sums: np.ndarray, rows: int) -> list[float]:
    """Return the scores of all metrics for sums [columns] over so many rows, in the order of their names."""
    scores, start = list[float](), 0
    for metric in metrics:
        scores += metric.score_of(sums[start : start + metric.columns], rows)
        start += metric.columns
    return scores


def _means(sums: np.ndarray, rows: int) -> list[float]:
    return [100 * float(each) / _ONE / rows for each in sums]


def _rouge_rows(of_lines: Any, of_line: Any, hypotheses: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """Return ROUGE; of texts of one line, rougeLsum is rougeL, and is not computed again."""
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        scorer = of_lines if "\n" in hypothesis + reference else of_line
        found = [round(each.fmeasure * _ONE) for each in scorer.score(reference, hypothesis).values()]
        rows.append(found if scorer is of_lines else [*found, found[-1]])
    return rows


def _exact_rows(hypotheses: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    same = (one.strip() == other.strip() for one, other in zip(hypotheses, references, strict=True))
    return [[_ONE * each] for each in same]


def _f1_rows(hypotheses: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    return [[round(_ONE * _token_f1(*each))] for each in zip(hypotheses, references, strict=True)]


def _token_f1(hypothesis: str, reference: str) -> float:
    """Return the F1 of the words of two texts, as SQuAD 2.0's script: of two texts without words it is 1."""
    one, other = _words(hypothesis), _words(reference)
    if not one or not other:
        return float(one == other)
    return 2 * (Counter(one) & Counter(other)).total() / (len(one) + len(other))


def _words(text: str) -> list[str]:
    """Return the words that SQuAD's script compares: in lower case, without ASCII punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()
