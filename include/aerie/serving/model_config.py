"""Reading a checkpoint's ``config.json`` for arithmetic: a field that is missing or makes no sense is an error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.errors import BadInput

WRAPPED = ("text_config", "language_config", "llm_config")
"""Where multimodal checkpoints keep the configuration of their language model."""

MOST = 1 << 40
"""No size of a model is larger; a number above it is a slip, and its products would not be numbers any more."""
MOST_OF: Mapping[str, int] = {"num_hidden_layers": 10_000}
"""Fields with a smaller limit: layers are gone through one by one."""


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a language model's configuration; ``where`` is what errors call it."""

    where: str
    fields: Mapping[str, Any]
    outer: Mapping[str, Any]

    @classmethod
    def of(cls, document: Any, *, where: str = "config.json") -> "ModelConfig":
        """The language model of a configuration, which a multimodal one wraps.

        Raises:
            BadInput: it is not an object with fields.
        """
        if not isinstance(document, Mapping):
            raise BadInput(f"{where}: expected an object with fields, found {type(document).__name__}")
        for name in WRAPPED:
            inner = document.get(name)
            if inner is None:
                continue
            if not isinstance(inner, Mapping):
                raise BadInput(f"{where}: {name} is {inner!r}: expected an object with the language model's fields")
            return cls(where=f"{where}: {name}", fields=inner, outer=document)
        return cls(where=where, fields=document, outer=document)

    @property
    def model_type(self) -> str:
        """The language model's type, else the wrapper's.

        Raises:
            BadInput: neither is there.
        """
        kind = self.fields.get("model_type", self.outer.get("model_type"))
        if not isinstance(kind, str) or not kind:
            raise BadInput(f"{self.where}: model_type is {kind!r}: expected the family's name, such as 'llama'")
        return kind

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.fields.get(name) is not None

    def count(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least`` to its limit; ``default`` where the field is absent or null.

        Raises:
            BadInput: it is missing without a default, or is something else.
        """
        value, most = self.fields.get(name), MOST_OF.get(name, MOST)
        if value is None:
            if default is not None:
                return default
            raise BadInput(f"{self.where}: {name} is missing: expected a whole number of at least {least}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadInput(f"{self.where}: {name} is {value!r}: expected a whole number from {least} to {most:,}")
        if value != int(value):
            raise BadInput(f"{self.where}: {name} is {value!r}: expected a whole number from {least} to {most:,}")
        return int(value)

    def flag(self, name: str) -> bool:
        """True or false; false where the field is absent or null.

        Raises:
            BadInput: it is something else.
        """
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadInput(f"{self.where}: {name} is {value!r}: expected true or false")
        return bool(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where the field is absent or null.

        Raises:
            BadInput: it is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise BadInput(f"{self.where}: {name} is {value!r}: expected a list of texts")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, of the language model or else of the wrapper; empty where absent or null.

        Raises:
            BadInput: it is something else.
        """
        value = self.fields.get(name)
        value = self.outer.get(name) if value is None else value
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise BadInput(f"{self.where}: {name} is {value!r}: expected an object")
        return value


def read_model_config(path: Path) -> ModelConfig:
    """The configuration in a checkpoint's folder, or in a ``config.json`` itself.

    Raises:
        BadInput: it cannot be read, is not JSON, or is not an object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not JSON: {error}") from error
    return ModelConfig.of(document, where=str(file))
