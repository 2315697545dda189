"""Object stores that speak S3. Importing any of its modules is an error with advice if no client is installed."""

import os

from paddle_reshard.pipeline.core.extras import require

_CRT = "BOTO_DISABLE_CRT"


def _import_botocore() -> None:
    """Import botocore without the signer of awscrt, which copies every body before it hashes it.

    It costs a fifth more for every upload. botocore looks at the variable once; who sets it decides.
    """
    chosen = os.environ.get(_CRT)
    os.environ.setdefault(_CRT, "true")
    try:
        import botocore.compat  # noqa: F401
    finally:
        if chosen is None:
            del os.environ[_CRT]


require("s3fs", "s3", "a store that speaks S3")
_import_botocore()
