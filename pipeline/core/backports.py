"""Names of the standard library that Python 3.10 does not have, for as long as it is supported."""

import sys

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack
