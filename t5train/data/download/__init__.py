"""Downloads files of remote sources: in parallel, resumable, and hashed while they arrive.

Datasets of the Hugging Face Hub that are named, and not their files, are streamed to files of passages.

Not here: which files a source stands for (``t5train.data.sources``), and object stores that results are published to
(``t5train.release.publication``).
"""
