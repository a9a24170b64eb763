"""All mutations, by topic. The tests of a topic are first run together, without a mutation."""

from tests.acceptance.mutations import (
    checkpoint_mutations,
    consolidation_mutations,
    operation_mutations,
    publication_mutations,
    storage_mutations,
    supervision_mutations,
    training_mutations,
)

TOPICS = (
    consolidation_mutations.MUTATIONS,
    publication_mutations.MUTATIONS,
    training_mutations.MUTATIONS,
    checkpoint_mutations.MUTATIONS,
    storage_mutations.MUTATIONS,
    supervision_mutations.MUTATIONS,
    operation_mutations.MUTATIONS,
)
MUTATIONS = tuple(mutation for topic in TOPICS for mutation in topic)
