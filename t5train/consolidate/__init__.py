"""DeepSpeed checkpoint to fp32 safetensors."""
