"""What to do where a gate failed or a usual cause is suspect, in the log and on the dashboard alike."""

from collections.abc import Iterable, Mapping

AGAIN = "then run train, export and benchmark again"

FOR_GATES: Mapping[str, str] = {
    "accepts at all": (
        "Something is wired wrongly, and more training will not help. Mend what is suspect below, layer ids and the "
        "algorithm's name first, then run export and benchmark again."
    ),
    "threshold": (
        f"Mend what is suspect below, {AGAIN}. If nothing is, train on more data or for more epochs; to take the "
        "drafter as it is, lower benchmark.minimum_acceptance_length and run benchmark again."
    ),
    "against the drafter in production": (
        "Leave that one in production. Train on at least as much of the same data sets; to take a drafter that is "
        "somewhat worse, lower benchmark.minimum_share_of_production and run benchmark again."
    ),
    "lossless": (
        "Do not serve it: the output is no longer the verifier's. benchmark/results.json of the edition names every "
        "sample and token where outputs part (divergences); compare the server's version and attention backend with "
        "those that were lossless before, or recommend another draft setting by benchmark.sweep."
    ),
}
"""By the gate's name."""

FOR_CAUSES: Mapping[str, str] = {
    "layer ids": (
        "Run export again with --force. If the states themselves are of other layers, set hidden_states.layers and run "
        f"capture again, {AGAIN}."
    ),
    "norm position": (
        "Where hidden_states.parity_rows was 0, set it and run capture again: it names the layer that differs. Mend "
        f"what computes the states, run capture with --force, {AGAIN}."
    ),
    "vocabulary mapping": (
        "Run vocabulary again with a larger vocabulary.size, or with vocabulary.coverage; if the outputs here are of "
        f"other kinds than the corpus, add a data set of them; {AGAIN}."
    ),
    "algorithm name": "Serve with --speculative-algorithm EAGLE3, as ./aerie deploy does.",
    "boundary broken in the data": (
        "Look at decoded samples of the data sets (./aerie show SAMPLE_ID): rows must begin, close their reasoning and "
        "end where the verifier's own outputs do. Mend the data set or leave it out, run validate and all that follows "
        "again."
    ),
    "sliding window": "Take --speculative-draft-window-size out of the server's arguments and run benchmark again.",
    "too little training": f"Raise training.epochs or training.learning_rate, or add data; {AGAIN}.",
}
"""By the cause's name."""


def advised(gates: Iterable[str], causes: Iterable[str]) -> list[str]:
    """What to do as lines: of the gates that failed, then of the causes that are suspect."""
    return [
        "what to do:",
        *(f"- {gate}: {FOR_GATES[gate]}" for gate in gates),
        *(f"- {cause}: {FOR_CAUSES[cause]}" for cause in causes),
    ]
