"""What is compiled where a model cannot be compiled as a whole."""

import pytest
from torch import nn

from t5train.model.compiled import compile_blocks
from t5train.model.shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec

# torch's compiler imports what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def _compiled(model: nn.Module) -> set[str]:
    compile_blocks(model)
    return {name for name, module in model.named_modules() if module._compiled_call_impl is not None}


def test_every_block_of_a_dense_model_is_compiled() -> None:
    model = T5(resolve(ModelSpec(preset="smoke"), 300), decoder_start_id=0)
    assert _compiled(model) == {f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in (0, 1)}


def test_of_a_block_with_experts_all_but_its_feed_forward_is_compiled() -> None:
    spec = ModelSpec.model_validate({"preset": "smoke", "version": "v1.0", "moe": {"num_experts": 4}})
    assert _compiled(T5(resolve(spec, 300), decoder_start_id=0)) == {
        "encoder.block.0",
        "encoder.block.1.layer.0",
        "decoder.block.0",
        "decoder.block.1.layer.0",
        "decoder.block.1.layer.1",
    }
