"""Start a real SGLang server on a machine without a GPU.

Run it as a script, `python launch_server.py SGLANG_ARGUMENTS...`: Python then puts this folder on the module
path, where SGLang finds the stand-in `sgl_kernel`. The processes that SGLang spawns run the top level of this file
again, with the same module path.

PyPI's torchvision is linked against the CUDA build of torch, so beside a CPU torch its compiled part does not load and
`import torchvision` stops at the fake kernels of two operators that nobody defined. SGLang needs only its pure-Python
transforms: declaring the two operators, before anything imports it, is enough.

The environment must hold `SGLANG_USE_CPU_ENGINE=1`, and `OMP_NUM_THREADS=1` on a small machine: with one OpenMP team
per process on two cores the same server is fifteen times slower.
"""

import os
import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main(arguments: list[str]) -> None:
    """Run the server until it is told to stop; end its worker processes with it."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        sys.exit("launch_server.py: the environment needs SGLANG_USE_CPU_ENGINE=1, or SGLang looks for a GPU")
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
