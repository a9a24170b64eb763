"""Lists the files of sources, and downloads remote ones: in parallel, resumable, and hashed while they arrive.

Datasets of the Hugging Face Hub that are named, and not their files, are streamed to files of passages.

Not here: object stores that results are published to (``t5train.release.publication``).
"""
