"""Where a drafter comes from: which stage wrote each file that another one read, told from the manifests alone."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit

from aerie.artefacts.manifest import InputFile, Manifest
from aerie.errors import BadInput

Proof = Literal["proven", "broken", "source", "unknown"]
"""``proven``: a stage wrote exactly these bytes. ``broken``: a stage wrote this file, but other bytes than were read.
``source``: a file from outside, which a first stage read. ``unknown``: no stage of the edition wrote it."""

FIRST_STAGES = ("prepare", "import")


@dataclass(frozen=True)
class Link:
    """A file that a stage read, and the manifest of the stage that wrote it, where there is one.

    ``written_sha256`` is what the writer last made of it, where that is not what was read.
    """

    uri: str
    sha256: str
    proof: Proof
    writer: Manifest | None
    written_sha256: str | None = None

    @property
    def name(self) -> str:
        """File name."""
        return PurePosixPath(unquote(urlsplit(self.uri).path)).name


@dataclass(frozen=True)
class Node:
    """One finished stage of a drafter's history."""

    manifest: Manifest
    links: tuple[Link, ...]

    @property
    def broken(self) -> tuple[Link, ...]:
        """What it read that is not what was written."""
        return tuple(link for link in self.links if link.proof == "broken")


@dataclass(frozen=True)
class Lineage:
    """The stages that a drafter was made by, each before what it read."""

    nodes: Sequence[Node]

    def of_stage(self, *stages: str, dataset: str | None = None) -> list[Node]:
        """Nodes of a stage; there are several where a later stage read what different runs of it wrote."""
        return [node for node in self.nodes if node.manifest.stage in stages and node.manifest.dataset == dataset]

    @cached_property
    def datasets(self) -> tuple[str, ...]:
        """Data sets that went in."""
        found = (node.manifest.dataset for node in self.nodes)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    @property
    def broken(self) -> tuple[tuple[Node, Link], ...]:
        """Every link that does not hold."""
        return tuple((node, link) for node in self.nodes for link in node.broken)


def trace_drafter(manifests: Iterable[Manifest], *, drafter_fingerprint: str) -> Lineage:
    """The lineage of an exported drafter; ``drafter_fingerprint`` may be its beginning.

    Raises:
        BadInput: no manifest of stage ``export`` has this fingerprint.
    """
    known = sorted(manifests, key=lambda manifest: manifest.finished_at)
    exports = [
        manifest
        for manifest in known
        if manifest.stage == "export" and manifest.fingerprint.startswith(drafter_fingerprint)
    ]
    if not exports:
        raise BadInput(
            f"no manifest of stage export has the fingerprint {drafter_fingerprint}: expected the one that made this "
            "drafter; its lineage cannot be told"
        )
    writers = _writers(known)
    nodes: dict[tuple[str, str | None, str, str], Node] = {}
    waiting = [exports[-1]]
    while waiting:
        manifest = waiting.pop(0)
        key = (manifest.stage, manifest.dataset, manifest.fingerprint, manifest.finished_at.isoformat())
        if key in nodes:
            continue
        node = Node(manifest, tuple(_link(manifest, read, writers) for read in manifest.inputs))
        nodes[key] = node
        waiting += [link.writer for link in node.links if link.writer]
    return Lineage(tuple(nodes.values()))


Writers = Mapping[str, Sequence[tuple[Manifest, str]]]


def _writers(manifests: Iterable[Manifest]) -> Writers:
    """Who wrote each file, and what, oldest first."""
    writers: defaultdict[str, list[tuple[Manifest, str]]] = defaultdict(list)
    for manifest in manifests:
        for output in manifest.outputs:
            writers[output.uri].append((manifest, output.sha256))
    return writers


def _link(reader: Manifest, read: InputFile, writers: Writers) -> Link:
    candidates = writers.get(read.uri, ())
    if not candidates:
        return Link(read.uri, read.sha256, "source" if reader.stage in FIRST_STAGES else "unknown", None)
    exact = [manifest for manifest, sha256 in candidates if sha256 == read.sha256]
    if exact:
        earlier = [manifest for manifest in exact if manifest.finished_at <= reader.finished_at]
        return Link(read.uri, read.sha256, "proven", (earlier or exact)[-1])
    writer, written = candidates[-1]
    return Link(read.uri, read.sha256, "broken", writer, written)
