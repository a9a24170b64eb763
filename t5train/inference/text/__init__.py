"""A model and a text: what it writes into gaps, and its loss on masked text."""
