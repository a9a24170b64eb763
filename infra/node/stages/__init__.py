"""What hosts do for stages other than training: workers of Dask that tokenise, and processes that predict.

Not here: how a shard or a prediction is made (``t5train``), and who gives hosts their jobs (``infra.head.tokenising``,
``infra.head.predicting``).
"""
