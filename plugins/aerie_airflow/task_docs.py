"""What each task does, what it needs, and what to do when it fails: ``doc_md`` of the DAG and of its tasks."""

from __future__ import annotations

from collections.abc import Mapping

DAG_DOC = """\
**From prompts to a measured EAGLE-3 drafter.** Prompts of up to ten data sets become responses of the verifier, every
response is judged, the kept ones become a corpus, hidden states are captured inside the server, a drafter is trained on
them, measured against a gate, and published.

**Needs**: the verifier's checkpoint, the sources of the data sets, a GPU host that holds the verifier (the demo needs
none). `plan` shows what the servers will be before anything starts.

**Run it** with *Trigger*: each field explains itself. **One data set again**: *Trigger*, *Backfill*, one day, and its
key in *Data sets*; a backfill ends with `validate` unless *To* says otherwise.

**When it fails**: the first error line of the failed task's log says what and what to do. Then *Clear* the run with
*Only failed*: what is finished is never done twice. A task that waits for another run of the same data set is not
failed: it is *up for reschedule* and its log says who it waits for.

More: `docs/airflow.md`.
"""


def task_doc(does: str, needs: str, fails: str) -> str:
    """One task's text, in the three parts that every task has."""
    return f"{does}\n\n**Needs**: {needs}\n\n**When it fails**: {fails}\n"


_CHANGE_AND_CLEAR = "the message names the setting or file; change it and clear the task."

STAGE_DOCS: Mapping[str, str] = {
    "plan": task_doc(
        "Shows what the run's servers will be and how long it takes: memory per GPU, KV tokens, the command lines.",
        "the verifier's configuration; it starts nothing.",
        "the plan cannot work: the message names the GPU or the host, the sum, and what to change. "
        "`./aerie plan --suggest` tries settings without a run.",
    ),
    "prepare": task_doc(
        "Renders the source's conversations with the verifier's own chat template, leaves out what is too long, "
        "contaminated or there twice, and writes the prompts in the order in which they are generated.",
        "the source (local files, or the hub) and the verifier's tokenizer.",
        f"{_CHANGE_AND_CLEAR} `./aerie sources` shows how a source is read.",
    ),
    "import": task_doc(
        "Checks rows that arrive tokenised and takes them over.",
        "the source's file, and the statement of how it was made.",
        "the message names the row and what was expected of it.",
    ),
    "serve_start": task_doc(
        "Starts the inference server that the phase needs, or shares the one that is there; waits for its turn where "
        "others hold another.",
        "the GPUs, a free port, the checkpoint. One start or training at a time (pool `aerie_gpus`).",
        "the message is the cause with evidence from the server's log, and the remedy; *Server log* shows the rest. "
        "`docs/serving.md` lists failures by symptom.",
    ),
    "serve_stop": task_doc(
        "Ends the run's hold of the server. When nobody else holds it, it is stopped, and it is verified that nothing "
        "of it is left.",
        "nothing: there may be no server.",
        "processes of the server survived; the message names them.",
    ),
    "generate": task_doc(
        "Sends prompts to the server until the data set has its token budget, judges every response as it comes, and "
        "starts with a canary: a few prompts across lengths that must pass before the rest.",
        "`prepare`, and a server, which it ensures itself on every try. One data set at a time (pool `aerie_server`).",
        "nothing that was answered is lost: clear the task and it goes on. A failed canary or quarantine rate means "
        "that the responses are wrong: read the samples in the log or on the data set's page first. Responses of other "
        "settings are never mixed: choose a new edition.",
    ),
    "validate": task_doc(
        "Judges every row of the data set against the verifier's grammar, writes what is kept, every verdict, and "
        "decoded previews.",
        "the responses (or the imported rows).",
        "more rows were quarantined than `generation.maximum_quarantine_share`: *Decoded samples* shows them with "
        "their reasons. Mend the cause, then `./aerie quarantine regenerate`.",
    ),
    "merge": task_doc(
        "Merges every validated data set of the edition into one shuffled corpus with its token frequencies.",
        "every data set that the edition has begun to be validated, unless `corpus.require` is `some`.",
        "the message names the data sets that are not validated; run a backfill of them.",
    ),
    "vocabulary": task_doc(
        "Chooses the draft vocabulary from the corpus's response tokens and measures what it covers.",
        "the corpus.",
        "the coverage is below `vocabulary.minimum_coverage`: raise `vocabulary.size`.",
    ),
    "forecast": task_doc(
        "Judges some rows of each data set once more, and sums up the bytes of the hidden states against the disk, and "
        "the hours of their capture, anew in every run.",
        "the corpus, and the disk of the data root.",
        "they do not fit: the message holds the sum. Make room, or take a smaller corpus. Or rows are broken: it "
        "holds the reason and the first row. Validate again, and merge with `--force`.",
    ),
    "capture": task_doc(
        "Sends every corpus row through the server, whose hooks write its hidden states, or through another back end "
        "(`hidden_states.backend`); checks each file, and compares a few with transformers.",
        "`forecast`, and the capture server, which it ensures itself (pool `aerie_server`); another back end takes the "
        "GPUs (pool `aerie_gpus`).",
        "files that are there and good are kept: clear the task and it goes on with the others.",
    ),
    "train": task_doc(
        "Trains the drafter on the captured hidden states.",
        "`capture` and `vocabulary`, and the GPUs without a server (pool `aerie_gpus`).",
        "hidden states that are wrong are named, and removed: clear `capture`, which makes only those again, and this "
        "task. A trainer that was interrupted has saved its state and resumes. A loss of 0 or NaN means wrong inputs: "
        "the message and `train.log` say which.",
    ),
    "export": task_doc(
        "Writes the best checkpoint as a drafter that SGLang loads, with its model card, and in vLLM's layout.",
        "`train`.",
        _CHANGE_AND_CLEAR,
    ),
    "benchmark": task_doc(
        "Measures acceptance length and speed on held-out prompts, with the drafter and without, and that the output "
        "is the same; recommends a draft setting; the drafter must pass the gates.",
        "`export`, and servers after each other, which it ensures itself (pool `aerie_server`).",
        "a drafter that fails a gate is not published: the message says which, and which usual causes are suspect.",
    ),
    "benchmark_drafter": task_doc(
        "Measures any drafter on our server, with and without it, or someone else's server as it is; it has no gate.",
        "held-out prompts of the edition, or a file of token ids; a drafter, or a server's URL (pool `aerie_server`).",
        f"{_CHANGE_AND_CLEAR} A poor drafter is a result, not a failure.",
    ),
    "publish": task_doc(
        "Copies the accepted drafter to `publish.folder`.",
        "`benchmark` passed.",
        _CHANGE_AND_CLEAR,
    ),
}

OPEN_RUN_DOC = task_doc(
    "Checks the run's parameters against the configuration and records the run.",
    "Aerie's database.",
    "a parameter is wrong: the message names it. Trigger another run.",
)
RECORD_DOC = task_doc(
    "Records in the store what a task on a host without the database left beside the data.",
    "Aerie's database, and the data root that both hosts share.",
    "it cannot see what the task left, or a file is damaged: the message names it. Clear it again, or the task.",
)
CLOSE_RUN_DOC = task_doc(
    "Writes the run's summary, and fails where a task failed, so that the run ends as it went.",
    "nothing: it runs however the others ended.",
    "it names the tasks that failed; look there.",
)
APPROVAL_DOC = task_doc(
    "Asks a person whether to go on, where the run's *Approvals* are on; it waits without a slot.",
    "somebody's answer under *Required actions*.",
    "nobody answered in time: clear it to be asked again.",
)
