"""One accepted generation as the front door hands it out. Importing this module never imports mlx."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.contracts.load import GenerationPhase, GenerationStatus
from engine.execution.isolation import failed_end

if TYPE_CHECKING:
    from engine.contracts.cancellation import AbortController, AbortReason
    from engine.contracts.errors import EngineError
    from engine.contracts.events import GenerationEvent, GenerationFinished
    from engine.execution.delivery import Mailbox
    from engine.execution.resident import Resident
    from engine.execution.rows import JobRow


class Generation:
    """One accepted generation: its events, its abort, its end. Used on the loop, except `abort`."""

    def __init__(
        self,
        *,
        generation_id: str,
        request_id: str,
        number: int,
        resident: Resident,
        controller: AbortController,
        mailbox: Mailbox,
        row: JobRow,
    ) -> None:
        """Built by the engine alone; `number` orders generations by arrival."""
        self.generation_id = generation_id
        self.request_id = request_id
        self.model = resident.info.name
        self.resident_number = resident.number
        self.aborted_at: float | None = None
        self._number = number
        self.arrived_at = time.time()
        self._controller = controller
        self._mailbox = mailbox
        self._row = row

    async def next_event(self) -> GenerationEvent:
        """Wait for the next event; tokens that piled up come merged. The end is always last."""
        return await self._mailbox.next_event()

    def abort(self, reason: AbortReason) -> None:
        """Raise the abort signal; the row leaves at the next safe point. Idempotent, from any thread."""
        if self._controller.abort(reason):
            self.aborted_at = time.perf_counter()

    async def finished(self) -> GenerationFinished:
        """Wait for the end without reading events."""
        return await self._mailbox.finished()

    def status(self) -> GenerationStatus:
        """Where it stands. What the engine thread writes is read as it is: parts may be a step apart."""
        row = self._row
        phase = GenerationPhase.PREFILLING if row.is_prefilling and not row.next_index else GenerationPhase.DECODING
        return GenerationStatus(
            number=self._number,
            generation_id=self.generation_id,
            request_id=self.request_id,
            model=self.model,
            phase=phase if self._mailbox.has_started else GenerationPhase.QUEUED,
            prompt_tokens=row.prompt_tokens,
            prefilled_tokens=min(row.position, row.prompt_tokens),
            generated_tokens=row.next_index,
            arrived_at=self.arrived_at,
        )

    def give_up(self, error: EngineError) -> None:
        """End without the engine thread, which does not answer any more; what it may still say is dropped."""
        self._mailbox.put(failed_end(self._row, error))
