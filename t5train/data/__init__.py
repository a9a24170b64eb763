"""Text to batches: corpus, tokenizer, shards, span corruption, loader."""
