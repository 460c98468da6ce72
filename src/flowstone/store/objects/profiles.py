"""Credentials of AWS profiles: they are in files that obstore does not read, and boto3 does."""

from __future__ import annotations

import os
from pathlib import Path

from flowstone.errors import ArgumentError, FrameworkError

_SCHEMES = ("s3://", "s3a://")
_GIVEN = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")  # obstore takes these itself


def of_profile(url: str) -> dict[str, object]:
    """What obstore is given for the profile that applies to a URL; nothing where none does.

    As with AWS's own programs the environment comes first, then AWS_PROFILE, or the profile `default`, of ~/.aws/config
    and ~/.aws/credentials (or AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE): keys, roles that are assumed, SSO.

    raises  FrameworkError  a profile is named, and boto3 is not installed
            ArgumentError   there is no such profile, or it cannot be used
    """
    if not url.startswith(_SCHEMES) or any(os.environ.get(name) for name in _GIVEN):
        return {}
    named = os.environ.get("AWS_PROFILE")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if not named and not any(Path(file).expanduser().exists() for file in files):
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if not named:
            return {}  # perhaps an instance's role has what is needed; the error says so where it has not
        raise FrameworkError(
            f"cannot use the AWS profile {named!r} for {url}: boto3, which reads profiles, is not installed",
            next="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from error
    try:
        session = boto3.Session()
        if session.get_credentials() is None:
            return {}
        return {"credential_provider": Boto3CredentialProvider(session)}
    except BotoCoreError as error:
        raise ArgumentError(
            f"cannot use the AWS profile {named or 'default'!r} for {url}", reason=f"{error!s:.300}",
            next="correct AWS_PROFILE or the files of ~/.aws; `aws sts get-caller-identity` tells whether it works",
        ) from error
