"""Responses as text for people. Control side: the tokenizer is in the model environment, and a step there decodes."""

import asyncio
import re
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from aerie.artefacts.previews import Preview, iterate_previews
from aerie.artefacts.response_log import Response
from aerie.errors import Failed
from aerie.processes import die_with_parent
from aerie.settings.machine import python_of, run_folder, variables_of
from aerie.stages import StageRequest

DECODING_SECONDS = 300.0
SHOWN_CHARACTERS = 600  # of a span
TOOL_KINDS = frozenset({"tool", "tool_section", "tool_id", "tool_arguments", "after_tools"})
LINE_BREAK = "\u23ce"


async def decode(request: StageRequest, responses: Sequence[Response]) -> list[Preview]:
    """Responses of the request's data set, decoded, in the order given.

    Raises:
        BadInput: the model environment has not been made.
        Failed: the step that decodes did not do so; the message has its last line.
    """
    place = run_folder(request.run_id)  # what is left of a caller that was killed goes with its run
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="decode-", dir=place) as name:
        folder = Path(name)
        paths = {option: folder / f"{option}.json" for option in ("request", "responses", "previews")}
        paths["request"].write_text(request.model_dump_json(), encoding="utf-8")
        paths["responses"].write_text("".join(f"{row.model_dump_json()}\n" for row in responses), encoding="utf-8")
        options = [part for option, path in paths.items() for part in (f"--{option}", str(path))]
        process = await asyncio.create_subprocess_exec(
            str(python_of("model")), "-m", "aerie", "decode", *options,
            env=variables_of("model"), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
            # A signal to a task's group ends the task, which then ends this; not this first, as if it had failed.
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), DECODING_SECONDS)
        except TimeoutError as error:
            raise Failed(f"decoding {len(responses)} responses took longer than {DECODING_SECONDS:.0f} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
            raise Failed(f"decoding ended with status {process.returncode}: {lines[-1]}")
        return list(iterate_previews(paths["previews"]))


def preview_lines(preview: Preview, *, characters: int | None = SHOWN_CHARACTERS) -> Iterator[str]:
    """A decoded response as lines: what it is, then each part of it, cut in its middle to ``characters``.

    Parts are named; ``boundary`` is a think tag. Special tokens are shown, a line break as a sign.
    """
    names = ", ".join((*preview.reasons, *preview.flags))
    yield (
        f"{preview.sample_id}: {preview.verdict}{f' ({names})' if names else ''}, {preview.prompt_tokens:,} prompt "
        f"tokens, {preview.response_tokens:,} of response, {preview.reasoning_tokens:,} of them reasoning"
    )
    for kind, spans in groupby(preview.spans, key=lambda span: "tools" if span[0] in TOOL_KINDS else span[0]):
        yield f"  {kind:>9} | {_shortened(''.join(text for _, text in spans), characters)}"


def _shortened(text: str, characters: int | None) -> str:
    shown = re.sub(r"\r?\n", LINE_BREAK, text)
    if characters is None or len(shown) <= characters:
        return shown
    half = characters // 2
    return f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
