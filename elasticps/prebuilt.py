"""Where numba finds kernels that an image brings along, compiled when it was built.

numba's own locator of NUMBA_CACHE_DIR takes a folder only if it can write there, which a container with a read-only
root cannot, and then numba refuses to import what it may not cache. This one only reads. An image asks for it by
NUMBA_CACHE_LOCATOR_CLASSES=elasticps.prebuilt.Prebuilt; nothing else imports this module.
"""

from __future__ import annotations

import os

from numba.core.caching import UserProvidedCacheLocator


class Prebuilt(UserProvidedCacheLocator):
    """The same place, taken as it is."""

    def ensure_cache_path(self) -> None:
        """Makes the folder where that is possible: when the image is built."""
        os.makedirs(self.get_cache_path(), exist_ok=True)  # type: ignore[no-untyped-call]  # numba has no types
