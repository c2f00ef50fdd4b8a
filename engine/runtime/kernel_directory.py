"""Where mlx keeps the CPU kernels that it compiles: executable code, so never in a folder that others may write."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from engine.runtime.private_directory import is_private, make_private_directory

logger = logging.getLogger(__name__)


def keep_kernels_private(directory: Path) -> None:
    """Point mlx's compiler at `directory`, unless the temporary folder is private already.

    mlx knows one way to choose: TMPDIR, read at each compilation. It is set for the whole process, once; Python's own
    `tempfile` has settled on its folder by then and keeps it.
    """
    if is_private(Path(os.path.realpath(tempfile.gettempdir()))):
        return
    try:
        os.environ["TMPDIR"] = str(make_private_directory(directory))
    except OSError as error:
        logger.warning("compiled kernels stay in the shared temporary folder: %s", error.strerror or error)
