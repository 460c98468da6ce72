"""Credentials of AWS profiles. boto3 reads the files with the profiles, since obstore does not."""

from __future__ import annotations

import os
from pathlib import Path

from flowstone.errors import ArgumentError, FrameworkError

_SCHEMES = ("s3://", "s3a://")
# obstore itself uses credentials in these variables
_GIVEN = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")


def profile_arguments(url: str) -> dict[str, object]:
    """obstore's arguments for the AWS profile that applies to a URL; empty if none does.

    As in AWS's own programs, credentials in environment variables come first. Otherwise the profile AWS_PROFILE, or
    `default`, in ~/.aws/config and ~/.aws/credentials (or AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE) is used; it may
    have keys, an assumed role, or SSO.

    raises  FrameworkError  a profile is named, but boto3 is not installed
            ArgumentError   the profile does not exist, or cannot be used
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
            return {}  # the machine's own role may have credentials; if not, a later error says so
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
            next="correct AWS_PROFILE or the files in ~/.aws; test them with `aws sts get-caller-identity`",
        ) from error
