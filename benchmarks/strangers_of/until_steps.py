"""Run a script as `python` does until its optimizers have taken so many steps, and tell which rates and batches it had.

python until_steps.py FILE STEPS SCRIPT.py ... | -m MODULE ...
"""

import json
import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

told, wanted, *words = sys.argv[1:]
rates: list[list[float]] = []
batches: list[int] = []
main_process = os.getpid()


def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if os.getpid() != main_process:
        return
    at = [group[key] for group in optimizer.param_groups for key in ("lr", "initial_lr") if key in group]
    at += [optimizer.defaults["lr"]] if "lr" in optimizer.defaults else []
    rates.append(sorted({float(rate) for rate in at}))  # a warm-up begins below the rate that was given
    if len(rates) == int(wanted):
        with open(told, "w") as file:
            json.dump({"rates": rates, "batches": sorted(set(batches))}, file)
        sys.stdout.flush()
        os._exit(0)


def note_batch(module: torch.nn.Module, args: object) -> None:
    if module.training and len(batches) < 10_000:
        batches.extend(len(one) for one in tensors_in(args) if one.dim())


def tensors_in(args: object) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [one for part in args for one in tensors_in(part)] if isinstance(args, list | tuple) else []


torch.nn.modules.module.register_module_forward_pre_hook(note_batch)
register_optimizer_step_post_hook(after_step)
loader_init = torch.utils.data.DataLoader.__init__


def noted_init(self, *args, **kwargs):
    loader_init(self, *args, **kwargs)
    if self.batch_size:
        batches.append(self.batch_size)


torch.utils.data.DataLoader.__init__ = noted_init
if words[0] == "-m":
    sys.argv = words[1:]
    sys.path[0] = os.getcwd()
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")
