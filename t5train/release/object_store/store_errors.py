"""Explains the errors of S3 clients and servers: what happened, and what to do.

Text of a server is never repeated, because it may contain keys. Its code and status are enough to look an error up.
"""

from typing import NamedTuple

from t5train.errors import StoreError

CONTENDED = ("ConditionalRequestConflict", "OperationAborted", "409")
"""Codes of a conditional write that collided with another one. Neither may have been done."""
WRONG_CHECKSUM = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch")
"""Codes of a server that compares a checksum with what it received, and finds that it is another one."""
DAMAGED_ANSWER = "FlexibleChecksumError"
"""The client's code for an object that arrives with other bytes than its checksum on the server is of."""
BEYOND_END = ("InvalidRange", "416")
"""Codes for a range that begins where an object ends, or after that."""
MISSING = ("NoSuchKey", "404")
"""Codes of an object that does not exist."""
_NO_ANSWER_CODES = (
    *("ReadTimeoutError", "ConnectionClosedError", "HTTPClientError"),
    *("RequestTimeout", "ResponseStreamingError", "IncompleteReadError"),
)
_BUSY_CODES = ("SlowDown", "ServiceUnavailable", "InternalError", "500", "502", "503", "504")
_UNREACHABLE_CODES = ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError")
TRANSIENT = (*_NO_ANSWER_CODES, *_BUSY_CODES, *_UNREACHABLE_CODES[:2], "Throttling", "TooManyRequests", "429")
"""Codes of failures that can pass. Only the server knows whether the request was done."""
IN_PROGRESS = "UploadInProgress"
"""The code for an upload that another process on this machine is making."""
PRECONDITION_FAILED = ("PreconditionFailed", "412")
"""Codes of a conditional write to a name that is taken."""
UNKNOWN_UPLOAD = "NoSuchUpload"
"""The code for a multipart upload that was completed or aborted, or never begun."""


class _Explanation(NamedTuple):
    cause: str
    remedy: str


_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws"
_EXPLANATIONS: dict[tuple[str, ...], _Explanation] = {
    ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"): _Explanation(
        "no credentials were found", f"Set {_CREDENTIALS} (AWS_PROFILE selects one)"
    ),
    ("ExpiredToken", "TokenRefreshRequired", "UnauthorizedSSOTokenError", "SSOTokenLoadError"): _Explanation(
        "the credentials have expired", f"Renew them: {_CREDENTIALS}"
    ),
    ("AccessDenied", "403", "AllAccessDisabled", "AccountProblem"): _Explanation(
        "access denied",
        "To read, these credentials need s3:GetObject and s3:ListBucket there; to publish, also s3:PutObject, "
        "s3:DeleteObject, s3:AbortMultipartUpload, s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts. "
        f"Grant them, or set others: {_CREDENTIALS}",
    ),
    ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"): _Explanation(
        "the bucket is in another region", "Set AWS_REGION, or region in ~/.aws/config, to the region of the bucket"
    ),
    _UNREACHABLE_CODES: _Explanation(
        "the server cannot be reached", "Check AWS_ENDPOINT_URL, the region and the network"
    ),
    _NO_ANSWER_CODES: _Explanation(
        "the server did not answer in time, or closed the connection",
        "Check the server and the network, then try again",
    ),
    _BUSY_CODES: _Explanation("the server is busy or failed, also after several tries", "Try again later"),
    WRONG_CHECKSUM: _Explanation(
        "the server received other bytes than were sent",
        "Try again; if it happens again, check this machine's memory",
    ),
    (DAMAGED_ANSWER,): _Explanation(
        "the bytes that arrived do not have the checksum that the server returned: the object is damaged in the store, "
        "or on the way here",
        "Try again; if it happens again, restore the object, or remove it and write it again",
    ),
    ("InvalidAccessKeyId",): _Explanation(
        "the server does not know this AWS_ACCESS_KEY_ID", f"Check {_CREDENTIALS}, and AWS_ENDPOINT_URL"
    ),
    ("SignatureDoesNotMatch",): _Explanation(
        "AWS_SECRET_ACCESS_KEY is not the one of this AWS_ACCESS_KEY_ID", f"Check {_CREDENTIALS}"
    ),
    ("RequestTimeTooSkewed",): _Explanation(
        "this machine's clock differs too much from the server's", "Set the clock (chronyc or timedatectl shows it)"
    ),
    ("NoSuchBucket",): _Explanation(
        "the bucket does not exist", "Create it, or check its name and AWS_ENDPOINT_URL; buckets are never created here"
    ),
    ("ProfileNotFound",): _Explanation("AWS_PROFILE names a profile that does not exist", "Add it to ~/.aws/config"),
    ("SSLError",): _Explanation(
        "there is no TLS connection",
        "If the server has none, begin AWS_ENDPOINT_URL with http://. If its certificate is private, set AWS_CA_BUNDLE",
    ),
    ("ValueError",): _Explanation("a setting is not valid", "AWS_ENDPOINT_URL must begin with https:// or http://"),
    ("NotImplemented",): _Explanation(
        "the server does not support this request", "Use a store with conditional writes and CRC64NVME checksums"
    ),
    (UNKNOWN_UPLOAD,): _Explanation(
        "another process aborted the upload", "Make sure that nothing else publishes there, then publish again"
    ),
}
_OF_WRONG_SERVERS = {
    *_UNREACHABLE_CODES,
    *("SSLError", "InvalidAccessKeyId", "NoSuchBucket", "ReadTimeoutError", "ConnectionClosedError"),
}
"""Codes that another server than the intended one causes, such as Amazon's without AWS_ENDPOINT_URL."""


def store_error(error: Exception, subject: str, endpoint: str = "") -> StoreError:
    """The error to raise for an error of boto3.

    ``subject`` says what could not be done, as in "URL cannot be read", and ``endpoint`` is the server's URL.
    """
    response = getattr(error, "response", None)
    answer = response if isinstance(response, dict) else None
    code = type(error).__name__ if answer is None else str(answer.get("Error", {}).get("Code", ""))
    if known := next((known for codes, known in _EXPLANATIONS.items() if code in codes), None):
        where = f" at {endpoint}" if code in _OF_WRONG_SERVERS and endpoint else ""
        return StoreError(f"{subject}: {known.cause} ({code}{where}). {known.remedy}", code=code)
    if answer is not None:
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return StoreError(f"{subject}: the server answered {code} (status {status})", code=code)
    return StoreError(f"{subject}: {code} in the S3 client. Check the URL, AWS_ENDPOINT_URL and ~/.aws", code=code)
