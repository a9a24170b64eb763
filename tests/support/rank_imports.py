"""What ranks of test programs import and load first, once for all of them (tests.support.forked_ranks)."""

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imports torch's compiler
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import get_accelerator

import t5train.train.loop  # noqa: F401

for builder in ("ShareMemCommBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(builder).load(verbose=False)
