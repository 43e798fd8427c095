"""Imports a library and prints what it says, as one line of JSON: a process of its own, which may crash, hang or say much else.

python -m batchscout.orchestrator.doctor.probe torch
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any


def _torch(torch: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "kernels": torch.cuda.get_arch_list() if is_available else [],
        "gpus": [_gpu(torch, number) for number in range(torch.cuda.device_count())] if is_available else [],
        "why_none": str(said[-1].message).splitlines()[0] if said and not is_available else "",
    }


def _gpu(torch: Any, number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    capability = (properties.major, properties.minor)
    return {"name": properties.name, "capability": capability, "total_bytes": total, "free_bytes": free}


if __name__ == "__main__":
    name = sys.argv[1]
    library = importlib.import_module(name)
    if name == "ray":
        importlib.import_module("ray.train")  # where most of Ray is
    told = _torch(library) if name == "torch" else {}
    print(json.dumps({"version": library.__version__, **told}))
