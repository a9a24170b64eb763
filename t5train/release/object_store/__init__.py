"""S3: publishing so that readers see everything or nothing, and fetching what was published.

boto3 is imported when a bucket is opened, because only machines that publish to S3 need it. Not here: other stores,
which fsspec reads and writes (``t5train.release.publication`` and ``t5train.release.verification``).
"""
