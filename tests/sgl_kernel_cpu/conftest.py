"""Puts the stand-in on the module path, as the launcher does for the server."""

import sys
from pathlib import Path

STAND_IN = Path(__file__).resolve().parents[2] / "include" / "sgl_kernel_cpu"
sys.path.insert(0, str(STAND_IN))

import launch_server  # noqa: E402, F401 - declares torchvision's operators, without which transformers cannot load here
