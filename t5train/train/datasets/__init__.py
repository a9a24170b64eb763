"""What a run trains on and is measured on: text, or pairs of texts."""
