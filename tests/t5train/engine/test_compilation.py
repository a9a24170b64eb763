"""What is compiled when a model cannot be compiled as a whole."""

import re
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from t5train.data.samples.loader import Batch
from t5train.engine.engine import compile_blocks, compile_gathered, compile_sublayers
from t5train.engine.forward_backward import WholePasses, rows_of
from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import LoraSpec, ModelSpec
from tests.support.training.ragged_pairs import PACKED, batch_of, make_model, make_pairs

# torch's compiler imports functions that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.mark.parametrize(
    ("settings", "experts"),
    [
        ({}, set()),
        ({"version": "v1.0", "moe": {"num_experts": 4}}, {"encoder.block.1.layer.1", "decoder.block.1.layer.2"}),
    ],
)
def test_every_sublayer_without_experts_is_compiled(settings: dict[str, Any], experts: set[str]) -> None:
    model = T5(resolve(ModelSpec.model_validate({"preset": "smoke", **settings}), 300), decoder_start_id=0)
    sublayers = {name for name, _ in model.named_modules() if re.fullmatch(r".*block\.\d\.layer\.\d", name)}
    assert len(sublayers) == 2 * 2 + 2 * 3
    compile_sublayers(model)
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == sublayers - experts


# torch's compiler looks at the gradients of a block's inputs, and instantiates autograd functions.
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["rows", "slots"])
def test_blocks_that_sort_tokens_are_compiled_whole_and_once(dispatch: Literal["rows", "slots"]) -> None:
    spec = ModelSpec.model_validate({"preset": "smoke", "version": "v1.0", "moe": {"num_experts": 4}})
    model = T5(resolve(spec, 300), decoder_start_id=0).bfloat16().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.05)
    for _, layer in model.sparse_layers():
        layer.dispatch = dispatch
    # Graphs are the same with every backend, and the usual one compiles C++ for minutes.
    compile_blocks(model, fullgraph=True, backend="aot_eager")
    _train(model, seed=1)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled = _train(model, seed=2)
    with torch.compiler.set_stance("force_eager"):
        assert compiled == pytest.approx(_train(model, seed=2), rel=0.02)
    counted = [int(layer.tokens.sum()) for _, layer in model.sparse_layers()]
    assert counted == [3 * 4 * length for length in (64, 20)]


def _train(model: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(0, 300, (4, length), generator=generator) for length in (64, 20))
    loss = model(inputs, targets)
    loss.backward()
    return float(loss.detach())


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_hooks_that_gather_a_block_are_not_compiled_with_it() -> None:
    model = T5(resolve(ModelSpec(preset="smoke"), 300), decoder_start_id=0).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.05)
    seen = list[bool]()
    for block in [*model.encoder.block, *model.decoder.block]:
        block.register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    plain = _train(model, seed=1)
    compile_gathered(model, fullgraph=True, backend="aot_eager")
    assert _train(model, seed=1) == pytest.approx(plain, rel=1e-6)
    with torch.compiler.set_stance("fail_on_recompile"):
        _train(model, seed=2)
        assert seen == [False] * 12
        passes = WholePasses(SimpleNamespace(module=model), SimpleNamespace(), None)  # type: ignore[arg-type]  # takes no steps
        ids = np.zeros(3, np.int64)
        other_size = Batch(ids, ids, np.ones((3, 17), np.int32), np.ones((3, 9), np.int32))
        (losses,) = passes.token_losses([other_size])  # runs plain code, so that nothing is compiled for this size
    assert losses.shape == (3, 9)


@pytest.mark.slow
def test_rows_of_pairs_with_dropout_compile_to_one_graph_though_they_are_recomputed() -> None:
    model = make_model("gated, tied", dropout_rate=0.1)
    checkpoint_activations(model)
    plain = _train_pairs(model, seed=1)
    model.compile(backend="aot_eager", fullgraph=True)
    assert _train_pairs(model, seed=1) == pytest.approx(plain, rel=1e-6)
    with torch.compiler.set_stance("fail_on_recompile"):
        _train_pairs(model, seed=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("lora", [LoraSpec(), LoraSpec(rank=3, targets=("q", "wo"), dropout=0.3)])
def test_code_of_a_block_with_dropout_by_keys_serves_all_blocks(lora: LoraSpec) -> None:
    torch._dynamo.reset()  # what earlier tests have compiled of blocks would count
    model = make_model("relu, tied", dropout_rate=0.1, lora=lora)
    plain = _train_pairs(model, seed=1)
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        compile_gathered(model, fullgraph=True, backend="aot_eager")
        assert _train_pairs(model, seed=1) == pytest.approx(plain, rel=1e-6)
    with torch.compiler.set_stance("fail_on_recompile"):
        _train_pairs(model, seed=2)


def _train_pairs(model: T5, seed: int) -> float:
    batch = batch_of(PACKED, make_pairs(seed), has_keys=True, global_targets=seed + 30)
    assert batch.segments is not None
    inputs, targets = (torch.from_numpy(each).long() for each in (batch.inputs, batch.targets))
    loss = model(inputs, targets, rows_of(batch.segments, passes_a_step=1))
    loss.backward()
    return float(loss.detach())
