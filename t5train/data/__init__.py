"""Text to batches: corpus, tokenizer and token shards, each a stage; then span corruption and the loader of ranks.

Not here: the settings (``t5train.spec.data_spec``), and the loop that trains on the batches (``t5train.train``).
"""
