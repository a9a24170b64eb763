"""T5, with Hugging Face's parameter names."""
