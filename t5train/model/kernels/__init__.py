"""Triton kernels for the model's training in 16 bits on NVIDIA GPUs, and the custom operators that launch them.

Only a training engine imports these modules: Triton is installed with torch for NVIDIA GPUs, and not elsewhere.

Not here: the model, which computes the same without kernels; the optimizer's kernels (t5train.engine).
"""
