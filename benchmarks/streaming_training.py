"""Two drafters of one edition, one trained with every state on the disk, one streamed in a tenth of that: are they one?

    PYTHONPATH=include .aerie/envs/airflow/bin/python benchmarks/streaming_training.py \
        --edition .aerie/data/editions/main [--config demo/config.yaml] [--share 0.1] [--epochs 3] [--folder FOLDER]

The edition needs its corpus; it is copied, and vocabulary, forecast, capture, train, export and benchmark run as
``./aerie`` runs them, twice, with a server of their own. What lies on the disk is looked at all the while. The training
losses say most: where they are the same, so is the drafter; the served acceptance length is the promise that is kept or
broken, and may differ by 3 %.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import read_manifest
from aerie.settings.pipeline import load_settings

GIB = 1 << 30
STAGES = ("vocabulary", "forecast", "capture", "train", "export", "benchmark")
MADE_HERE = (
    "vocabulary",
    "hidden_states",
    "training",
    "drafter*",
    "benchmark*",
    "locks",
    *(f"{name}.manifest.json" for name in STAGES),
)
ALLOWED = 0.03


class Disk:
    """The most bytes of state files that lay in a folder, looked at by another thread."""

    def __init__(self, folder: Path) -> None:
        self.most = 0
        self._folder = folder
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            taken = 0
            for path in self._folder.rglob("*.safetensors"):
                with contextlib.suppress(FileNotFoundError):
                    taken += 0 if path.is_symlink() else path.stat().st_blocks * 512
            self.most = max(self.most, taken)

    def __enter__(self) -> "Disk":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def run(folder: Path, edition: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the stages on a copy of the edition below ``folder``, and return what was measured."""
    files = EditionFiles(folder / "data", "main")
    shutil.copytree(edition, files.folder, ignore=shutil.ignore_patterns(*MADE_HERE))
    configuration = folder / "config.yaml"
    configuration.write_text(yaml.safe_dump(settings))
    variables = {
        **os.environ,
        "AERIE_DATA_ROOT": str(folder / "data"),
        "AERIE_SERVER_FOLDER": str(folder / "server"),
        "AERIE_CONFIG": str(configuration),
    }
    seconds: dict[str, float] = {}
    with Disk(files.hidden_states) as disk:
        for stage in STAGES:
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "aerie", stage, "--edition", "main"], env=variables, check=True)
            seconds[stage] = round(time.monotonic() - began, 1)
    trained = read_manifest(files.manifest("train")).counts
    steps = [json.loads(line) for line in (files.training / "steps.jsonl").read_text().splitlines()]
    return {
        "seconds": seconds,
        "capture_bytes": read_manifest(files.manifest("capture")).counts["bytes"],
        "disk_bytes_at_most": disk.most,
        "steps": trained["steps"],
        "losses": [step["loss"] for step in steps],
        "validation": trained["validation"],
        "streamed": trained["streamed"],
        "acceptance_length": read_manifest(files.manifest("benchmark")).counts["acceptance_length"],
    }


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edition", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path("demo/config.yaml"))
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "streaming_training")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    settings = load_settings(arguments.config).model_dump(mode="json")
    if arguments.epochs is not None:
        settings["training"]["epochs"] = arguments.epochs
    kept = run(arguments.folder / "kept", arguments.edition, settings)
    limit = int(kept["capture_bytes"] * arguments.share)
    settings["hidden_states"]["disk_limit_gib"] = limit / GIB
    streamed = run(arguments.folder / "streamed", arguments.edition, settings)
    apart = max(abs(a - b) / a for a, b in zip(kept.pop("losses"), streamed.pop("losses"), strict=True))
    ratio = streamed["acceptance_length"] / kept["acceptance_length"]
    report = {
        "limit_bytes": limit,
        "kept": kept,
        "streamed": streamed,
        "losses_apart_at_most": apart,
        "acceptance_length_ratio": ratio,
        "holds": abs(ratio - 1) <= ALLOWED and streamed["disk_bytes_at_most"] <= limit,
    }
    print(json.dumps(report, indent=2))
    sys.exit(not report["holds"])


if __name__ == "__main__":
    main()
