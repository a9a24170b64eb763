"""Text to token shards, as Prefect tasks: one library call each.

The library decides whether a result that is there is reused; Prefect neither caches nor keeps results.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.os_errors import as_storage_errors
from t5train.records import Corpus, TokenizerFiles, TokenShards
from t5train.spec import RunSpec
from tasks.stage_progress import StageProgress


@task(name="corpus", cache_policy=NO_CACHE)
@as_storage_errors()
def make_corpus(spec: RunSpec) -> Corpus:
    """Find or make the text, and verify every file of it."""
    return build_corpus(spec.corpus, spec.storage.root, StageProgress("corpus"))


@task(name="tokenizer", cache_policy=NO_CACHE)
@as_storage_errors()
def make_tokenizer(spec: RunSpec, corpus: Corpus) -> TokenizerFiles:
    """Train the vocabulary, or take the given one."""
    return build_tokenizer(spec.tokenizer, spec.corpus, corpus, spec.storage.root, StageProgress("tokenizer"))


@task(name="shards", cache_policy=NO_CACHE)
@as_storage_errors()
def make_shards(spec: RunSpec, corpus: Corpus, tokenizer: TokenizerFiles) -> TokenShards:
    """Turn the text into files of token ids."""
    return build_shards(spec.shards, spec.corpus, corpus, tokenizer, spec.storage.root, StageProgress("shards"))
