"""From token shards to batches: the order of samples, span corruption, and the loader of a rank.

Not here: the shards themselves (``t5train.data.shards``).
"""
