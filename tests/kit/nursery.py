"""A process that has imported everything and forks one child for each command line it is given.

Importing torch takes longer than the merges that are killed here. Protocol, one line each: a request in JSON
(argv, what to do in the child first, and code to run in place of the program, if any), the child's pid, and when it
has ended its exit status.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

import lora_merge.batch.run
import lora_merge.cli.main
import lora_merge.engine.merge
import lora_merge.engine.pipeline
import lora_merge.engine.window_merger
import lora_merge.recipes.replay

LIMITS = {"FSIZE": resource.RLIMIT_FSIZE, "DATA": resource.RLIMIT_DATA}


def child(request: dict[str, object]) -> int:
    """Run one command line; its exit code."""
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.chdir(str(request["cwd"]))
    if request.get("lost"):
        Path.cwd().rmdir()
    for name, value in dict(request.get("limits") or {}).items():  # type: ignore[call-overload]
        resource.setrlimit(LIMITS[name], (value, value))
    fault = request.get("fault")
    if fault:
        call, at, kind, path = fault  # type: ignore[misc]
        ctypes.CDLL(None).fault_set(call.encode(), at, kind.encode(), path.encode())
    sys.argv = ["lora-merge", *map(str, request["argv"])]  # type: ignore[call-overload]
    try:
        if "code" in request:
            exec(str(request["code"]), {"__name__": "__main__"})
        else:
            lora_merge.cli.main.main()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 99
    return 0


def warm() -> None:
    """One merge, after which patterns are compiled and late imports done: a third of the time of each child."""
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        base, adapter, out = (f"{folder}/{name}.safetensors" for name in ("base", "adapter", "out"))
        save_file({"blocks.0.weight": torch.full((8, 8), 99.0)}, base)
        up, down, alpha = torch.ones(8, 1), torch.ones(1, 8), torch.tensor(1.0)
        save_file({"blocks.0.lora_up.weight": up, "blocks.0.lora_down.weight": down, "blocks.0.alpha": alpha}, adapter)
        sys.argv = ["lora-merge", base, adapter, "-o", out, "-q"]
        lora_merge.cli.main.main()


def main() -> None:
    """Serve until stdin ends."""
    warm()
    gc.collect()
    gc.freeze()  # a child that looks for garbage would copy every page of what is imported here
    running: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            code = child(request)
            if "code" in request:
                sys.exit(code)  # the end of a process is a part of what such code does
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        running[pid] = 1
        print(pid, flush=True)


if __name__ == "__main__":
    main()
