"""torch.compile of a model step by step, where it cannot be compiled as a whole.

How many tokens an expert gets is known only as it runs, and a pipeline's stages meet outside of any graph. What lies
between is compiled all the same: the steps of blocks are alike, so that what was compiled for one serves all of its
kind.
"""

from torch import nn

from t5train.model.t5 import Block


def compile_steps(model: nn.Module) -> None:
    """Compile attention and feed-forward of every block of ``model`` in place, but for experts and their router."""
    for block in model.modules():
        if isinstance(block, Block):
            for step in block.layer[:-1] if block.is_sparse else block.layer:
                step.compile()
