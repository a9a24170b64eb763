"""Which layers of a T5 each stage of a pipeline holds."""

from functools import cache
from itertools import accumulate, pairwise

from t5train.data.samples.span_corruption import Geometry
from t5train.errors import SpecError
from t5train.model.model_shape import RELATIVE_BUCKETS, T5Shape, block_parameters


def stage_bounds(shape: T5Shape, num_stages: int, sample: Geometry) -> list[int]:
    """Return bounds such that stage s holds units ``bounds[s]`` to ``bounds[s + 1]`` (exclusive).

    The units are the encoder's blocks, the decoder's blocks, and the output. The bounds minimise the cost of the
    slowest stage. Raises SpecError if there are more stages than units.
    """
    costs = unit_costs(shape, sample)
    if num_stages > len(costs):
        raise SpecError(
            f"layout.pipeline_stages is {num_stages}: the model can be split into at most {len(costs)} stages "
            f"(encoder blocks: {shape.num_layers}, decoder blocks: {shape.num_decoder_layers}, output: 1). "
            "Lower layout.pipeline_stages"
        )
    return balanced(costs, num_stages)


def stage_parameters(shape: T5Shape, num_stages: int, sample: Geometry) -> list[int]:
    """Return an upper bound on the number of parameters of each stage.

    It counts the stage's units and biases and, in the first stage and a tied last one, the embedding.
    """
    bounds = stage_bounds(shape, num_stages, sample)
    embedding = shape.vocab_size * shape.d_model
    encoder, decoder = block_parameters(shape)
    units = [encoder] * shape.num_layers + [decoder] * shape.num_decoder_layers + [0 if shape.tied else embedding]
    embeds = {0, len(units) - 1} if shape.tied else {0}
    rest = 2 * (shape.d_model + RELATIVE_BUCKETS * shape.num_heads)
    return [
        sum(units[start:stop]) + rest + (embedding if embeds.intersection(range(start, stop)) else 0)
        for start, stop in pairwise(bounds)
    ]


def unit_costs(shape: T5Shape, sample: Geometry) -> list[int]:
    """Return the multiplications of each unit's forward pass over one sample. Embeddings are look-ups, at no cost."""
    attention, feed_forward = shape.d_model * shape.inner, (3 if shape.gated else 2) * shape.d_model * shape.d_ff
    inputs, targets = sample.input_tokens, sample.target_tokens
    encoder = inputs * (4 * attention + feed_forward) + 2 * inputs * inputs * shape.inner
    own = targets * (6 * attention + feed_forward) + 2 * targets * targets * shape.inner
    decoder = own + inputs * 2 * attention + 2 * targets * inputs * shape.inner
    output = targets * shape.d_model * shape.vocab_size
    return [encoder] * shape.num_layers + [decoder] * shape.num_decoder_layers + [output]


def balanced(costs: list[int], num_parts: int) -> list[int]:
    """Return bounds that split ``costs`` into non-empty runs with the smallest possible maximum cost."""
    before = [0, *accumulate(costs)]

    @cache
    def best(parts: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """Return the smallest maximum cost of ``parts`` runs that end at ``stop``, and their bounds."""
        if parts == 1:
            return before[stop], (0, stop)
        return min(
            (max(best(parts - 1, start)[0], before[stop] - before[start]), (*best(parts - 1, start)[1], stop))
            for start in range(parts - 1, stop)
        )

    return list(best(num_parts, len(costs))[1])
