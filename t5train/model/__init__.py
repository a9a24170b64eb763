"""The T5 model, with Hugging Face's parameter names."""
