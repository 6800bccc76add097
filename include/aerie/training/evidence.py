"""What is looked at once more before training is paid for: the rows' boundaries, and what their states say.

Both go into the manifest too, for whoever asks later why a drafter is bad.
"""

from dataclasses import asdict, dataclass
from typing import Any

from aerie.artefacts.manifest import Manifest
from aerie.artefacts.state_files import link_path
from aerie.corpus.boundaries import Boundaries, require_sound_rows
from aerie.hidden_states.last_slot import LastSlot, measure_last_slot, require_last_slot, spaced_rows
from aerie.hidden_states.streaming import is_streamed
from aerie.stages import Events, StageRequest


@dataclass(frozen=True)
class Evidence:
    """What was found."""

    boundaries: Boundaries
    last_slot: LastSlot

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for the manifest."""
        return {
            "boundaries": self.boundaries.counts,
            "last_slot": {**asdict(self.last_slot), "problem": self.last_slot.problem},
        }


def look_again(request: StageRequest, rows: int, captured: Manifest, events: Events) -> Evidence:
    """Look at some of the corpus' ``rows`` and their states; of streamed ones at what ``captured`` says of its sample.

    Raises:
        BadInput: the verifier's head or tokens cannot be read.
        Failed: rows break the boundary of prompt and response, or states are not those that the verifier is served
            with.
    """
    files, settings = request.files, request.settings
    boundaries = require_sound_rows(files, settings)
    if is_streamed(captured):
        last_slot = LastSlot(**captured.counts["last_slot"])
    else:
        last_slot = measure_last_slot(
            spaced_rows(files, rows), lambda row: link_path(files.hidden_states, row.row), settings.verifier.path
        )
    require_last_slot(last_slot, files.hidden_states)
    events.progress(
        f"{boundaries.rows} rows stand at their boundary; the verifier's head names {last_slot.agreement:.1%} of "
        f"{last_slot.tokens} response tokens first, from the states of the last layer"
    )
    return Evidence(boundaries, last_slot)
