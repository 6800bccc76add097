"""The form of a run: what a person may ask, in words. Airflow refuses what the schemas do not allow, in UI and REST."""

from __future__ import annotations

from collections.abc import Sequence

from airflow.sdk import Param

from aerie.artefacts.layout import EDITION_PATTERN
from aerie.pipeline import BACKFILL_END, DEFAULT_EDITION, LAST_STEP, STEPS

# Airflow shows a section of our own folded: what every run is asked has none, and is seen at once.
EXTENT, PEOPLE = "Which steps", "Who decides"
STEP_NAMES = {step: f"{number}. {step}" for number, step in enumerate(STEPS, start=1)}


def form(datasets: Sequence[str]) -> dict[str, Param]:
    """The parameters of a run over these data sets, in the order in which the form shows them."""
    keys = list(datasets)
    return {
        "datasets": Param(
            keys,
            type="array",
            items={"type": "string", "enum": keys},
            examples=keys,
            minItems=1,
            uniqueItems=True,
            title="Data sets",
            description_md=(
                "Data sets that this run works on. Those of the edition that were validated before stay in the corpus. "
                "**In a backfill**, tick *Override parameters on existing runs* above: without it Airflow sends "
                "nothing of this form, and the run takes all data sets."
            ),
        ),
        "edition": Param(
            DEFAULT_EDITION,
            type="string",
            pattern=EDITION_PATTERN,
            examples=[DEFAULT_EDITION, "2026-01", "kimi-k25-pilot"],
            title="Edition",
            description_md=(
                "Label of one population of data: lower-case letters, digits, `_` and `-`. **The same edition goes "
                "on** from what is there; a new one starts afresh. Another model or other sampling needs a new one."
            ),
        ),
        "budget_tokens": Param(
            None,
            type=["null", "integer"],
            minimum=0,
            title="Token budget",
            description_md=(
                "Kept response tokens of each generated data set, such as `1000000`. Empty: as configured. "
                "`0`: all prompts. A larger budget in the same edition generates only what is missing."
            ),
        ),
        "pilot": Param(
            False,
            type="boolean",
            title="Pilot",
            description_md=(
                "A small share of the budgets through every step up to the acceptance gate, never to publishing. "
                "The same edition without it goes on from there."
            ),
        ),
        "from": Param(
            STEPS[0],
            type="string",
            enum=list(STEPS),
            values_display=STEP_NAMES,
            title="From",
            section=EXTENT,
            description_md="First step; what comes before it is left as it is, and must be there.",
        ),
        # Airflow's form sends every field, of a backfill too: only an empty one says that nobody chose a step.
        "to": Param(
            None,
            type=["null", "string"],
            enum=[None, *STEPS],
            values_display={"null": f"as usual: {LAST_STEP}, a backfill {BACKFILL_END}", **STEP_NAMES},
            title="To",
            section=EXTENT,
            description_md=f"Last step. As usual: `{LAST_STEP}`; a **backfill** ends with `{BACKFILL_END}`.",
        ),
        "force": Param(
            False,
            type="boolean",
            title="Force",
            section=EXTENT,
            description_md=(
                "Run steps again that already have an answer. Responses stay and are judged again; all hidden "
                "states of the edition are discarded and captured again; training begins anew."
            ),
        ),
        "approvals": Param(
            False,
            type="boolean",
            title="Approvals",
            section=PEOPLE,
            description_md=(
                "Ask a person before hidden states are captured (with disk, hours and cost) and before the drafter is "
                "published (with its acceptance). See *Required actions* of the run."
            ),
        ),
    }
