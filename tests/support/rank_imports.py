"""What ranks of test programs import and load first, once for all of them (tests.support.forked_ranks)."""

from importlib import import_module

import deepspeed.ops
from deepspeed.accelerator import get_accelerator

# Every optimizer imports torch's compiler, and so does DeepSpeed's check of an optimizer, by way of Muon.
for module in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "t5train.train.loop", "pytest"):
    import_module(module)
for builder in ("ShareMemCommBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(builder).load(verbose=False)
deepspeed.ops.__compatible_ops__  # noqa: B018 - reading it runs a compiler to probe the operators, once for all ranks
