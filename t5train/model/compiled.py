"""torch.compile of a model block by block, where it cannot be compiled as a whole.

How many tokens an expert gets is known only as it runs, and a pipeline's stages meet outside of any graph. What lies
between is compiled all the same: blocks are alike, so that what was compiled for one serves all of its stack.
"""

from torch import nn

from t5train.model.t5 import Block


def compile_blocks(model: nn.Module) -> None:
    """Compile every block of ``model`` in place; of one with experts all but the experts and their router."""
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        if block.is_sparse:
            *attention, _ = block.layer
            for step in attention:
                step.compile()
        else:
            block.compile()
