"""Mutations of publishing, to a folder and to S3, and of what keeps secrets out of it."""

from tests.acceptance.mutations.mutation import Mutation

_STORE = "t5train/release/object_store"
_TESTS = "tests/t5train/release/object_store"

MUTATIONS = [
    Mutation(
        name="manifest-written-before-the-files",
        claims=("safety: Readers see part of a publication in S3",),
        file=f"{_STORE}/bucket_publication.py",
        anchor="found = _publication_of_another(bucket, uploads, part_bytes, type(record))",
        replacement="found = None",
        tests=(
            f"{_TESTS}/test_killed_upload.py"
            "::test_an_upload_killed_at_any_request_is_completed_by_the_next_and_readers_see_all_or_nothing",
        ),
    ),
    Mutation(
        name="manifest-replaces-one-of-another-run",
        claims=("safety: Two runs publish to one destination of a bucket at a time",),
        file=f"{_STORE}/bucket_publication.py",
        anchor='ContentType="application/json", IfNoneMatch="*",',
        replacement='ContentType="application/json",',
        tests=(
            f"{_TESTS}/test_bucket_publication.py"
            "::test_of_two_exports_the_first_to_write_the_manifest_wins_and_the_other_removes_its_objects",
        ),
    ),
    Mutation(
        name="bytes-that-changed-while-sent-accepted",
        claims=("safety: Bytes are changed on their way to S3",),
        file=f"{_STORE}/file_body.py",
        anchor="if self._at == self._size and self._crc != crc:",
        replacement="if self._at > self._size and self._crc != crc:",
        tests=(
            f"{_TESTS}/test_file_body.py::test_a_file_that_is_changed_while_it_is_sent_keeps_its_size_and_is_refused",
        ),
    ),
    Mutation(
        name="sha256-not-compared-while-read",
        claims=("safety: Bytes are changed on their way to S3",),
        file=f"{_STORE}/measured_file.py",
        anchor="if FileDigest(size=self._at, sha256=self._sha256.hexdigest()) != self.digest:",
        replacement="if self._at != self.digest.size:",
        tests=(
            f"{_TESTS}/test_files_while_sent.py"
            "::test_a_file_that_is_changed_after_its_certificate_was_checked_is_not_published",
        ),
    ),
    Mutation(
        name="fingerprint-alone-identifies-a-publication",
        claims=("safety: Another model is taken for the published one",),
        file=f"{_STORE}/published_manifest.py",
        anchor="if theirs.get(name) != ours.get(name)]",
        replacement="if name not in theirs]",
        tests=(
            "tests/t5train/release/test_publication.py"
            "::test_a_publication_of_other_files_under_the_same_fingerprint_is_not_reused",
        ),
    ),
    Mutation(
        name="text-of-the-server-repeated-in-errors",
        claims=("safety: Credentials for S3 leak",),
        file=f"{_STORE}/store_errors.py",
        anchor="{known.cause} ({code}{where}). {known.remedy}",
        replacement="{known.cause} ({code}{where}). {known.remedy}: {error}",
        tests=(f"{_TESTS}/test_store_errors.py::test_an_error_of_the_server_is_explained_without_its_text",),
    ),
    Mutation(
        name="names-may-lead-out-of-a-folder",
        claims=("safety: A listing, key, manifest, sidecar or host names a file outside",),
        file="t5train/files/confined.py",
        anchor='{".", ".."} & set(parts)',
        replacement='{"."} & set(parts)',
        tests=(
            "tests/t5train/files/test_confined.py::test_an_unsafe_name_is_refused_with_its_source",
            "tests/t5train/release/test_verification.py::test_a_manifest_cannot_name_files_outside_its_folder",
        ),
    ),
    Mutation(
        name="links-in-the-cache-followed",
        claims=("safety: A link in the cache redirects a download",),
        file="t5train/data/download/kept_downloads.py",
        anchor="if parent.is_symlink():",
        replacement="if parent.is_symlink() and not parent.exists():",
        tests=(
            "tests/t5train/data/test_hostile_listings.py::test_a_link_in_the_cache_does_not_lead_a_download_elsewhere",
        ),
    ),
    Mutation(
        name="wrong-downloads-kept",
        claims=("safety: A listing, key, manifest, sidecar or host names a file outside",),
        file="t5train/data/download/downloads.py",
        anchor="if each.expected is not None and sha256 != each.expected:",
        replacement="if each.expected is not None and len(sha256) != len(each.expected):",
        tests=("tests/t5train/data/test_download.py::test_a_file_that_is_wrong_twice_is_refused",),
    ),
    Mutation(
        name="webhook-shown-in-errors",
        claims=("safety: The URL of a webhook leaks",),
        file="flows/deployment/notifications.py",
        anchor="is not a URL that begins with https:// or http://",
        replacement="is {url}, not a URL that begins with https:// or http://",
        tests=("tests/flows/deployment/test_notifications.py::test_another_value_is_refused_without_showing_it",),
    ),
    Mutation(
        name="wandb-key-shown-in-the-log",
        claims=("safety: The API key of Weights & Biases leaks",),
        file="t5train/train/wandb_sync.py",
        anchor='return text.replace(key, "[secret]") if key else text',
        replacement='return text if key else ""',
        tests=(
            "tests/t5train/train/test_wandb_sync.py::test_a_wandb_that_fails_is_reported_once_and_training_continues",
        ),
    ),
    Mutation(
        name="variables-of-ranks-shown",
        claims=("safety: The API key of Weights & Biases leaks",),
        file="infra/head/launch/local_launch.py",
        anchor="environment: Mapping[str, str] = field(default_factory=dict, repr=False)",
        replacement="environment: Mapping[str, str] = field(default_factory=dict)",
        tests=(
            "tests/infra/head/preflight/test_monitor_checks.py"
            "::test_the_key_reaches_ranks_in_their_environment_and_nothing_else",
        ),
    ),
]
