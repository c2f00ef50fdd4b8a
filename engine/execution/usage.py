"""Finishes the accounts of experts' use when a generation has ended, for steppers of every method."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.contracts.graph import ExpertRuntime

logger = logging.getLogger(__name__)


def finish_usage(experts: ExpertRuntime | None) -> None:
    """Write down what `experts` counted, if there is anything that counts. What fails there ends nobody."""
    if experts is None:
        return
    try:
        experts.finish_usage()
    except Exception:
        logger.exception("the accounts of experts' use could not be written")
