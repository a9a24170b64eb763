"""Downloads files of remote sources: in parallel, resumable, and hashed while they arrive.

Not here: which files a source stands for (``t5train.data.sources``), and object stores that results are published to
(``t5train.release.publication``).
"""
