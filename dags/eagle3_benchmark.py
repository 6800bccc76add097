"""Measures a drafter outside the pipeline: each one that is published, or by hand any drafter or server.

**What it does.** Without `server_url`, our server is started with the verifier alone and then with the drafter, and
held-out prompts are sent to both, greedily, at each concurrency. With `server_url`, a server that already serves a
drafter is measured as it is; speed-up and losslessness only where `verifier_url`, the same verifier without a drafter,
is given too. Every measurement is kept in the history of its drafter.

**What it needs.** Prompts: those that `prepare` held out of the edition's data sets, or a file of token ids. Drafters
and files lie below the data root, the folder of checkpoints or that of published drafters.

**When it fails.** The message says what to change. It has no gate: a poor drafter is a result, not a failure.
"""

from airflow.sdk import DAG, Param

from aerie.artefacts.layout import EDITION_PATTERN
from aerie.pipeline import DEFAULT_EDITION
from aerie.placement import placement_arguments
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import is_tokenised, load_settings
from aerie_airflow.assets import DRAFTER
from aerie_airflow.benchmarks import BenchmarkOperator
from aerie_airflow.notifications import RunFailureNotifier
from aerie_airflow.task_defaults import TASK_DEFAULTS
from aerie_airflow.task_docs import STAGE_DOCS

SETTINGS = load_settings(settings_path())
DATASETS = [key for key in SETTINGS.datasets if not is_tokenised(key)]


def optional(kind: str, title: str, description: str, **schema: object) -> Param:
    """A field that may stay empty."""
    return Param(None, type=["null", kind], title=title, description=description, **schema)


params = {
    "drafter": optional(
        "string", "Drafter", "Its id in the registry, its folder or file:// URI; empty: the one just published."
    ),
    "server_url": optional(
        "string", "Server", "A server that already serves a drafter, such as http://10.0.0.5:8000; empty: ours."
    ),
    "verifier_url": optional(
        "string", "Plain verifier", "With a server: the same verifier without a drafter, to compare with."
    ),
    "edition": Param(
        DEFAULT_EDITION,
        type="string",
        pattern=EDITION_PATTERN,
        title="Edition",
        description="Whose held-out prompts are sent. A drafter that was just published brings its own.",
    ),
    "datasets": Param(
        DATASETS,
        type="array",
        items={"type": "string", "enum": DATASETS},
        examples=DATASETS,
        minItems=1,
        title="Data sets",
        description="Data sets whose held-out prompts are sent.",
    ),
    "prompts_file": optional("string", "Prompts", 'Instead of them, a file of JSON lines {"prompt_ids": [...]}.'),
    "prompts_per_dataset": optional("integer", "Prompts a data set", "Empty: as configured.", minimum=1),
    "concurrency": Param(
        [],
        type="array",
        items={"type": "integer", "minimum": 1},
        title="Concurrency",
        description="Requests at a time, such as [1, 8, 32]: each is measured on its own. Empty: as configured.",
    ),
    "num_steps": optional("integer", "Draft steps", "Of our server; empty: as configured.", minimum=1),
    "eagle_topk": optional("integer", "Top-k", "Of our server; empty: as configured.", minimum=1),
    "num_draft_tokens": optional("integer", "Draft tokens", "Of our server; empty: as configured.", minimum=1),
    "force": Param(False, type="boolean", title="Force", description="Measure again what was measured."),
}

with DAG(
    dag_id="eagle3_benchmark",
    description="Acceptance and speed of any drafter",
    doc_md=__doc__,
    schedule=[DRAFTER],
    # A server for each drafter that is published is for whoever wants it: switch the DAG on.
    is_paused_upon_creation=True,
    catchup=False,
    max_active_runs=1,
    params=params,
    tags=["aerie", "eagle-3"],
    default_args={**TASK_DEFAULTS},
    on_failure_callback=RunFailureNotifier(),
):
    measure = BenchmarkOperator(
        task_id="measure",
        stage="benchmark_drafter",
        doc_md=STAGE_DOCS["benchmark_drafter"],
        **placement_arguments(SETTINGS, "benchmark_drafter"),
    )
    stop_server = BenchmarkOperator(
        task_id="stop_server",
        stage="serve_stop",
        phase="benchmark",
        doc_md=STAGE_DOCS["serve_stop"],
        **placement_arguments(SETTINGS, "serve_stop"),
    )
    measure >> stop_server.as_teardown()
