"""A model that trains with the kernels computes what it computes without: in fp32, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, library, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from t5train.data.samples.span_corruption import Geometry
from t5train.engine.forward_backward import rows_of
from t5train.model import attention
from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.lora import add_adapters
from t5train.model.model_shape import T5Shape, resolve
from t5train.model.parameters import name_of_factor
from t5train.model.pipeline import pipeline_model
from t5train.model.t5 import T5, PairRows
from t5train.spec import LoraSpec, ModelSpec
from tests.support.needed_triton import require_triton
from tests.support.training.ragged_pairs import PACKED, batch_of, fill, make_pairs

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the modules import Triton.
from t5train.model.kernels import biased_attention, gated_gelu  # noqa: E402 - see above

# On a GPU, the kernels multiply fp32 numbers in TF32.
pytestmark = pytest.mark.skipif(HAS_GPU, reason="compares fp32 numbers to seven digits, in Triton's interpreter")
BOUND = 2e-5
"""Largest relative distance, ||with - without|| / ||without||, of the loss and of each parameter's gradient."""
VERSIONS = ("v1.0", "v1.1")
VOCABULARY, SAMPLES = 300, 2
NO_LORA = LoraSpec()
LORA = LoraSpec(rank=3, alpha=6.0, targets=("q", "v", "o", "wi", "wi_1"), dropout=0.2)
"""Some layers of each joint projection have adapters, and some have none."""
LENGTHS, FEWER = (130, 20), (20, 9)
"""Tokens of inputs and targets. With 130, some tiles lie beyond the farthest distance that the bias tells apart."""


@pytest.fixture(autouse=True)
def few_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let biases tell 24 distances apart, not 128, as the interpreter runs about 100 programs of a kernel a second.

    Each distance takes two for each head. test_biased_attention.py takes 128.
    """
    monkeypatch.setattr(attention, "RELATIVE_MAX_DISTANCE", 24)


def _shape(version: str, num_layers: int = 1, num_heads: int = 1, dropout_rate: float = 0.0) -> T5Shape:
    settings = {"preset": "smoke", "num_layers": num_layers, "num_decoder_layers": 1, "d_model": 64, "d_kv": 32}
    settings |= {"num_heads": num_heads, "version": version, "dropout_rate": dropout_rate}
    return resolve(ModelSpec.model_validate(settings), VOCABULARY)


def _model(shape: T5Shape, lora: LoraSpec = NO_LORA) -> T5:
    model = T5(shape, decoder_start_id=0)
    add_adapters(model, lora)
    for name, parameter in model.named_parameters():
        fill(name_of_factor(name), parameter, shape)
    return model


def _with_kernels(model: Any) -> Any:
    biased_attention.use_in(model)
    gated_gelu.use_in(model)
    return model


def _batch(lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randint(0, VOCABULARY, (SAMPLES, n), generator=generator) for n in lengths)
    return inputs, targets


def _pairs(has_keys: bool, lengths: tuple[int, int] = (18, 19)) -> tuple[Tensor, Tensor, PairRows]:
    """Rows that hold several pairs; one holds none."""
    batch = batch_of((*PACKED, ()), make_pairs(), lengths, has_keys)
    assert batch.segments is not None
    return *(torch.from_numpy(each).long() for each in (batch.inputs, batch.targets)), rows_of(batch.segments, 1)


def _pass(model: nn.Module, lengths: tuple[int, int] = FEWER) -> dict[str, Tensor]:
    """The loss and the gradients of all parameters that are trained."""
    return _pass_of(model, _batch(lengths))


def _pass_of(model: nn.Module, batch: tuple[Any, ...]) -> dict[str, Tensor]:
    loss = model(*batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"loss": loss.detach(), **gradients}


def _require_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    distances = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert max(distances.values()) <= BOUND, distances


@pytest.mark.slow
@pytest.mark.parametrize(("version", "num_layers", "num_heads"), [("v1.0", 2, 1), ("v1.1", 1, 2)])
def test_loss_and_gradients_are_those_without_kernels(version: str, num_layers: int, num_heads: int) -> None:
    shape = _shape(version, num_layers, num_heads)
    expected, found = _pass(_model(shape), LENGTHS), _pass(_with_kernels(_model(shape)), LENGTHS)
    _require_close(found, expected)
    assert any(not torch.equal(found[name], each) for name, each in expected.items()), "no kernel was used"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "rate", "lora"),
    [
        ("v1.1", 0.1, NO_LORA),
        pytest.param("v1.0", 0.1, LORA, id="v1.0-0.1-LoRA"),
        pytest.param("v1.1", 0.0, LORA, id="v1.1-0.0-LoRA"),
    ],
)
def test_loss_and_gradients_of_pairs_are_those_without_kernels(version: str, rate: float, lora: LoraSpec) -> None:
    """With the masks of dropout that are drawn without kernels, also of adapters alone."""
    shape, batch = _shape(version, 1, 2, rate), _pairs(has_keys=rate + lora.dropout > 0, lengths=(70, 19))
    expected, found = _pass_of(_model(shape, lora), batch), _pass_of(_with_kernels(_model(shape, lora)), batch)
    _require_close(found, expected)
    assert any(not torch.equal(found[name], each) for name, each in expected.items()), "no kernel was used"


@pytest.mark.slow
def test_no_tensor_has_numbers_for_all_queries_and_keys() -> None:
    """In training on pairs, the lengths of sources and targets are never both in the shape of one tensor."""
    model = _with_kernels(_model(_shape("v1.1", dropout_rate=0.1)))
    with _Shapes() as seen:
        _pass_of(model, _pairs(has_keys=True, lengths=(37, 41)))
    assert {shape for shape in seen.shapes if sum(n in {37, 41} for n in shape) > 1} == set()
    with _Shapes() as seen:
        _pass_of(_model(_shape("v1.1", dropout_rate=0.1)), _pairs(has_keys=True, lengths=(37, 41)))
    assert {(5, 1, 37, 37), (5, 1, 41, 41), (5, 1, 41, 37)} <= seen.shapes


class _Shapes(TorchDispatchMode):
    """Collects the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(each.shape) for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_does_not_use_the_kernels(version: str) -> None:
    plain, ours = _model(_shape(version, 2, 2)).eval(), _with_kernels(_model(_shape(version, 2, 2))).eval()
    inputs, targets = _batch(LENGTHS)
    with torch.no_grad():
        assert torch.equal(ours.logits(inputs, targets), plain.logits(inputs, targets))
        assert torch.equal(ours.token_losses(inputs, targets), plain.token_losses(inputs, targets))


# torch's compiler looks at gradients of tensors that are not leaves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("batch", [_batch(FEWER), _pairs(has_keys=True)], ids=["text", "pairs"])
def test_a_recomputed_and_a_compiled_pass_are_those_of_the_kernels(batch: tuple[Any, ...]) -> None:
    shape = _shape("v1.1", dropout_rate=0.1 if len(batch) > 2 else 0.0)
    eager, recomputed, compiled = (_with_kernels(_model(shape)) for _ in range(3))
    checkpoint_activations(recomputed)
    compiled.compile(backend="aot_eager", fullgraph=True)
    expected = _pass_of(eager, batch)
    assert all(torch.equal(each, expected[name]) for name, each in _pass_of(recomputed, batch).items())
    _require_close(_pass_of(compiled, batch), expected)


class OneProcess(nn.Module):
    """The layers of a pipeline with two stages, one after the other in this process."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        sample = Geometry(window_tokens=sum(FEWER) - 4, noise_tokens=FEWER[1] - 2, spans=1)
        assert (sample.input_tokens, sample.target_tokens) == FEWER
        self.shared, self.steps = nn.ModuleDict(), list[Any]()
        for units in (range(1), range(1, 3)):
            for layer in pipeline_model._stage(shape, 0, sample, units):
                self._append(layer.spec)

    def _append(self, spec: Any) -> None:
        """Build a layer as DeepSpeed does: a tied layer once."""
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.shared:
                self.shared[spec.key] = spec.build()
            module, call = self.shared[spec.key], spec.forward_fn
            self.steps.append(lambda flow: call(module, flow) if call else module(flow))
        elif isinstance(spec, LayerSpec):
            module = spec.build()
            self.add_module(str(len(self.steps)), module)
            self.steps.append(module)
        else:
            self.steps.append(spec)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        flow: Any = (inputs, targets)
        for step in self.steps:
            flow = step(flow)
        return nn.functional.cross_entropy(flow.flatten(0, 1), targets.flatten())


def test_a_pipeline_trains_with_the_kernels_alike() -> None:
    plain, ours = OneProcess(_shape("v1.1")), OneProcess(_shape("v1.1"))
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0)
    ours.load_state_dict(plain.state_dict())
    found, expected = _pass(_with_kernels(ours)), _pass(plain)
    _require_close(found, expected)
    assert any(not torch.equal(found[name], each) for name, each in expected.items()), "no kernel was used"


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
TESTS = {"self": QUICK, "pairs": QUICK, "cross": (*QUICK, "test_aot_dispatch_dynamic")}
"""The tests of opcheck; with a bias, the fourth would take much longer."""


@pytest.mark.parametrize("name", TESTS)
def test_the_attention_operators_keep_the_rules_of_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, parts = (noise(1, 3, 1, 32).requires_grad_(), 2) if name == "cross" else (None, 3)
    packed = noise(1, 5, parts, 1, 32).requires_grad_()
    table = None if name == "cross" else biased_attention.table_of(noise(1, 49)).requires_grad_()
    segments, keys = torch.tensor([[1, 1, 2, 2, 0]], dtype=torch.int32), torch.arange(5)[None]
    known = attention.AttentionRows(segments, segments, keys, keys) if name == "pairs" else None
    rows = biased_attention._tensors(packed, table, False, known, 0.1)
    _opcheck(biased_attention._attention, (query, packed, table, rows, False, 0.1), name)
    out, lse = (each.detach() for each in biased_attention._attention(query, packed, table, rows, False, 0.1))
    saved = (each if each is None else each.detach() for each in (query, packed, table))
    is_frozen = name == "pairs"
    given = (noise(*out.shape), *saved, rows, out, lse, False, 0.1, is_frozen)
    _opcheck(biased_attention._attention_backward, given, name)


def _opcheck(operator: Any, arguments: tuple[Any, ...], name: str) -> None:
    found = library.opcheck(operator, arguments, test_utils=TESTS[name])
    assert {*found.values()} == {"SUCCESS"}


def test_the_gated_gelu_operators_keep_the_rules_of_torch() -> None:
    joint = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    slope, keys = joint[:, :20].contiguous(), torch.arange(3)
    for dropout in ((None, 0.0), (keys, 0.1)):
        library.opcheck(gated_gelu.gated_gelu, (joint.clone().requires_grad_(), *dropout))
        library.opcheck(gated_gelu._gated_gelu_backward, (slope, joint, *dropout))
