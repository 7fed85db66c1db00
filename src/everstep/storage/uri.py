"""Arguments in the address of a bucket, as Ray Train (through pyarrow) takes them, as ``storage_options``."""

from __future__ import annotations

from urllib.parse import parse_qsl

from everstep.errors import ConfigError

_FIELD = "RunConfig.storage_path"
_TAKEN = ("endpoint_override", "region", "scheme")


def without_arguments(uri: str) -> tuple[str, dict[str, str]]:
    """The address without ``?endpoint_override=…&region=…&scheme=…``, and what that means for S3. Any other
    argument is refused; a question mark that begins none is part of a key.
    """
    if "://" not in uri:
        return uri, {}
    scheme, _, rest = uri.partition("://")
    if "@" in rest.split("/", 1)[0]:
        # What is before the @ isn't shown: it may be a secret.
        bucket = rest.split("/", 1)[0].rpartition("@")[2]
        raise ConfigError(
            f"storage_path {scheme}://…@{bucket} has credentials before the bucket.",
            "Give them as storage_options={'aws_access_key_id': …, 'aws_secret_access_key': …}, or in the "
            "environment.",
            _FIELD,
        )
    address, _, query = uri.partition("?")
    arguments = dict(parse_qsl(query, keep_blank_values=True)) if "=" in query else {}
    if not arguments:
        return uri, {}
    unknown = [name for name in arguments if scheme != "s3" or name not in _TAKEN]
    if unknown:
        raise ConfigError(
            f"storage_path has the argument {unknown[0]!r}, which isn't taken for {scheme}://.",
            "Leave it out, and give RunConfig(storage_options={…}) with the names that obstore uses, for "
            "example {'aws_endpoint': 'http://localhost:9000', 'aws_region': 'x', 'allow_http': True}.",
            _FIELD,
        )
    return address, _as_options(arguments)


def _as_options(arguments: dict[str, str]) -> dict[str, str]:
    options = {}
    if region := arguments.get("region"):
        options["aws_region"] = region
    if endpoint := arguments.get("endpoint_override"):
        if "://" not in endpoint:
            endpoint = f"{arguments.get('scheme') or 'https'}://{endpoint}"
        options["aws_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = "true"
    return options
