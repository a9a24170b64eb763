"""All mutations, by topic."""

from tests.acceptance.mutations import (
    checkpoint_mutations,
    consolidation_mutations,
    operation_mutations,
    publication_mutations,
    storage_mutations,
    supervision_mutations,
    training_mutations,
)

MUTATIONS = (
    *consolidation_mutations.MUTATIONS,
    *publication_mutations.MUTATIONS,
    *training_mutations.MUTATIONS,
    *checkpoint_mutations.MUTATIONS,
    *storage_mutations.MUTATIONS,
    *supervision_mutations.MUTATIONS,
    *operation_mutations.MUTATIONS,
)
