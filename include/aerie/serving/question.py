"""The known question: whether the served model answers as its family does, in its own tokens."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.boundary import judge
from aerie.serving.errors import WrongServer
from aerie.serving.passage import Ask
from aerie.serving.probing import Probing
from aerie.settings.profile import Frozen

MOST_ANSWER_TOKENS = 1024
TRIES = 3
"""Answers are sampled: one that is odd says little, three say that the server is broken."""
SHOWN_TOKENS = 12


class Answer(Frozen):
    """An answer that is as it should be: how long it is, why it ended, its flags, and at which try it came."""

    tokens: int
    finish: str
    flags: tuple[str, ...]
    tries: int


class _Finish(BaseModel):
    type: str


class _Meta(BaseModel):
    finish_reason: _Finish
    completion_tokens: int


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore")

    output_ids: list[int]
    meta_info: _Meta


def ask_question(ask: Ask, probing: Probing, *, room: int, where: str) -> Answer:
    """Have the question answered, and judge the answer as every response is judged.

    An answer that is cut at the cap need not have closed its reasoning, but must not be a loop, nor hold tokens that no
    response may hold.

    Args:
        ask: sends a request.
        probing: the question.
        room: tokens that question and answer may have together.
        where: what the message of an error begins with.

    Raises:
        WrongServer: no answer of three is right; the message has the reasons, as ``aerie.boundary.rules`` names them.
        NotReady: as ``ask`` raises.
    """
    question = probing.texts.question_ids
    cap = min(MOST_ANSWER_TOKENS, room - len(question))
    if cap < 1:
        raise WrongServer(
            f"{where}: a question of {len(question)} tokens does not fit into {room}: raise context_length"
        )
    wrong = []
    for attempt in range(1, TRIES + 1):
        reply = _checked(ask({"input_ids": list(question), "sampling_params": _sampling(probing, cap)}), where)
        verdict = judge(
            question,
            reply.output_ids,
            grammar=probing.grammar,
            finish_reason=reply.meta_info.finish_reason.type,
            completion_tokens=reply.meta_info.completion_tokens,
            max_new_tokens=cap,
        )
        if verdict.kept:
            finish = reply.meta_info.finish_reason.type
            return Answer(tokens=len(reply.output_ids), finish=finish, flags=verdict.flags, tries=attempt)
        wrong.append(f"{', '.join(verdict.reasons)} in {_shown(reply.output_ids)}")
    raise WrongServer(
        f"{where}: {TRIES} answers to a question that every model answers are not as profile {probing.profile.name} "
        f"has them: {'; '.join(wrong)}. The model is broken as served (dtype, kv_cache_dtype, attention backend), or "
        "the profile is of another family; ./aerie profile check tells"
    )


def _sampling(probing: Probing, cap: int) -> dict[str, object]:
    return {**probing.sampling, "max_new_tokens": cap}


def _checked(reply: object, where: str) -> _Reply:
    try:
        return _Reply.model_validate(reply)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise WrongServer(f"{where}: {field}: {first['msg']}: expected the answer to a question") from error


def _shown(ids: Sequence[int]) -> str:
    head = ", ".join(map(str, ids[:SHOWN_TOKENS]))
    return f"{len(ids)} tokens [{head}{', ...' if len(ids) > SHOWN_TOKENS else ''}]"
