"""The clients in Python that benchmarks.publishing compares, as a program that imports only what they need.

python -m benchmarks.publishing_clients {ours,boto3} FOLDER URL
"""

import sys
from pathlib import Path


def publish(folder: Path, url: str) -> None:
    """Publish an export."""
    from t5train.records.stage_records import Export
    from t5train.release import publication

    publication.publish(Export.load(folder), url)


def upload_with_boto3(folder: Path, url: str) -> None:
    """Upload the files of a folder with boto3's defaults, several at a time."""
    from boto3.s3.transfer import TransferConfig, create_transfer_manager
    from boto3.session import Session

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    with create_transfer_manager(
        Session().client("s3"), TransferConfig(preferred_transfer_client="classic")
    ) as manager:
        for sent in [manager.upload(str(path), bucket, f"{prefix}/{path.name}") for path in folder.iterdir()]:
            sent.result()


if __name__ == "__main__":
    {"ours": publish, "boto3": upload_with_boto3}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
