"""What is compiled when a model cannot be compiled as a whole."""

import re

import pytest
from torch import nn

from t5train.engine.engine import compile_sublayers
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec

# torch's compiler imports functions that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def _compiled(model: nn.Module) -> set[str]:
    compile_sublayers(model)
    return {name for name, module in model.named_modules() if module._compiled_call_impl is not None}


def _sublayers(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules() if re.fullmatch(r".*block\.\d\.layer\.\d", name)}


def test_every_sublayer_of_a_dense_model_is_compiled() -> None:
    model = T5(resolve(ModelSpec(preset="smoke"), 300), decoder_start_id=0)
    assert len(_sublayers(model)) == 2 * 2 + 2 * 3
    assert _compiled(model) == _sublayers(model)


def test_every_sublayer_without_experts_is_compiled() -> None:
    spec = ModelSpec.model_validate({"preset": "smoke", "version": "v1.0", "moe": {"num_experts": 4}})
    model = T5(resolve(spec, 300), decoder_start_id=0)
    assert _compiled(model) == _sublayers(model) - {"encoder.block.1.layer.1", "decoder.block.1.layer.2"}
