"""From text to batches: the stages corpus, tokenizer and shards, then span corruption and the ranks' data loader.

Not here: the settings (``t5train.spec.data_spec``), and the loop that trains on the batches (``t5train.train``).
"""
