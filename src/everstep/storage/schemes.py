"""The stores by the scheme of their address. Imports nothing, since configs need it, too."""

from __future__ import annotations

from typing import NamedTuple


class BucketScheme(NamedTuple):
    """Buckets that are reached through ``obstore``."""

    store: str
    """The class in ``obstore.store``."""
    environment: str
    """What the variables begin with that it takes options from."""
    example: str
    no_bucket: tuple[str, ...]
    """Parts of its service's errors for a missing bucket, which are otherwise like those for a missing
    object.
    """
    no_credentials: tuple[str, ...]
    """Parts of errors for missing credentials, which are otherwise like temporary errors."""


BUCKETS = {
    "s3": BucketScheme("S3Store", "AWS_", "s3://bucket/prefix", ("NoSuchBucket",), ("169.254.169.254",)),
    "gs": BucketScheme(
        "GCSStore",
        "GOOGLE_",
        "gs://bucket/prefix",
        ("bucket does not exist",),
        ("metadata.google.internal", "computeMetadata"),
    ),
    "az": BucketScheme(
        "AzureStore",
        "AZURE_",
        "az://container/prefix",
        ("ContainerNotFound", "container does not exist"),
        ("169.254.169.254", "MissingCredential"),
    ),
}
MEMORY = "memory"
"""This process's, for tests: no run can have it as its storage."""


def any_bucket() -> str:
    """``s3://, gs:// or az://``, for errors."""
    *others, last = (f"{scheme}://" for scheme in BUCKETS)
    return f"{', '.join(others)} or {last}"
