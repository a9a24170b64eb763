"""What ranks of test programs import and load first, once for all of them (tests.support.forked_ranks)."""

from importlib import import_module

from deepspeed.accelerator import get_accelerator

# Every optimizer imports torch's compiler, and so does DeepSpeed's check of an optimizer, by way of Muon.
for module in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "t5train.train.loop"):
    import_module(module)
for builder in ("ShareMemCommBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(builder).load(verbose=False)
