"""Runs the cases of optimizer_cases.py with torch, and records what it does.

`python tests/conformance/torch_optimizers.py`, in an environment with torch, writes recorded_optimizers.json.gz beside
this file. Two things are changed in torch for this, so that results are the same bits on every processor, and ours can
be compared with them bit by bit: it computes without fused multiply-add, and with numpy's square root, because that of
Intel's MKL, which torch uses, is not always rounded correctly. test_optimizers_live.py compares with torch as it is.

With --check nothing is written: it fails when what torch does now differs from what is stored.
"""

import base64
import gzip
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"

import numpy as np
import torch
from optimizer_cases import CASES, CLIPPED, DTYPES, OURS, SPARSE, Digest, gradients, initial, rate, rows, table

RECORDED = Path(__file__).with_name("recorded_optimizers.json.gz")


class Lion(torch.optim.Optimizer):
    """The optimizer of https://arxiv.org/abs/2302.06675, which torch lacks, as its program 1 says."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                beta1, beta2 = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * beta1 + grad * (1 - beta1)
                param.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(grad, alpha=1 - beta2)


def _slots(kind, options):
    if kind == "SGD":
        return ("momentum_buffer",) if options.get("momentum") else ()
    if kind in ("Adam", "AdamW", "SparseAdam"):
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options.get("amsgrad") else ("exp_avg", "exp_avg_sq")
    if kind == "RMSprop":
        more = [name for name, wanted in (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
                if options.get(wanted)]  # fmt: skip
        return ("square_avg", *more)
    return ("sum",) if kind == "Adagrad" else ("exp_avg",)


def run(name, dtype):
    """Runs a case. Returns, for each leaf, the weights and the state at the end, and the digest of all steps."""
    kind, options, scheduled = (CASES | CLIPPED)[name]
    given = {key: value for key, value in options.items() if key not in OURS and key != "lr"}
    weights = {path: torch.nn.Parameter(torch.tensor(array)) for path, array in initial(dtype).items()}
    slots = _slots(kind, options)
    groups = []
    for path, parameter in weights.items():
        group = {"params": [parameter]}
        if path in options.get("no_decay", ()):
            group["weight_decay"] = 0
        groups.append(group)
    factors = {"w": 0.7, "bias": 0.3} if "lr_factor" in options else {"w": 1.0, "bias": 1.0}
    cls = Lion if kind == "Lion" else getattr(torch.optim, kind)
    more = {} if kind == "Lion" else {"foreach": False}
    optimizer = cls(groups, **given, **more, **({"lr": options["lr"]} if "lr" in options else {}))
    base = optimizer.param_groups[0]["lr"]
    averages = {path: parameter.detach().clone() for path, parameter in weights.items()}
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(options["ema"]) if "ema" in options else None
    digest = Digest()
    leaves = {}
    for step, gradient in enumerate(gradients(dtype)):
        for (path, parameter), group in zip(weights.items(), optimizer.param_groups, strict=True):
            parameter.grad = torch.tensor(gradient[path])
            group["lr"] = (rate(step, base) if scheduled else base) * factors[path]
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(list(weights.values()), options["clip_norm"])
        optimizer.step()
        if average is not None:
            average(list(averages.values()), [each.detach() for each in weights.values()], None)
        for path, parameter in weights.items():
            state = [optimizer.state[parameter][slot] for slot in slots] + ([averages[path]] if average else [])
            leaves[path] = [each.detach().numpy() for each in (parameter, *state)]
            digest.add(leaves[path])
    return {**leaves, "digest": digest.text()}


def run_sparse(name, dtype):
    """Runs a case with rows. Returns the weights and the state at the end."""
    _, kind, options = SPARSE[name]
    weights = torch.nn.Parameter(torch.tensor(table(dtype)))
    optimizer = getattr(torch.optim, kind)([weights], **options)
    for indices, values in rows(dtype):
        weights.grad = torch.sparse_coo_tensor(torch.tensor(indices)[None], torch.tensor(values), weights.shape)
        optimizer.step()
    return [weights.detach().numpy(), *(optimizer.state[weights][slot].numpy() for slot in _slots(kind, options))]


def encoded(array):
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _sqrt(tensor):
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(tensor.detach().numpy()))


def main():
    recorded = {"torch": torch.__version__}
    for dtype in DTYPES:
        for name in CASES | CLIPPED:
            done = run(name, dtype)
            recorded[f"{name} {dtype}"] = {
                "digest": done.pop("digest"), **{path: [*map(encoded, every)] for path, every in done.items()}
            }  # fmt: skip
        for name in SPARSE:
            recorded[f"{name} {dtype}"] = [*map(encoded, run_sparse(name, dtype))]
    text = json.dumps(recorded, sort_keys=True, separators=(",", ":")).encode()
    if "--check" in sys.argv[1:]:
        old = json.loads(gzip.decompress(RECORDED.read_bytes()))
        differ = [key for key in {**old, **recorded} if key != "torch" and old.get(key) != recorded.get(key)]
        if differ:
            sys.exit(f"torch {torch.__version__} differs from what {old['torch']} did: {', '.join(differ)}")
        return
    RECORDED.write_bytes(gzip.compress(text, 9, mtime=0))
    print(f"torch {torch.__version__}: {len(recorded) - 1} cases, {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    torch.sparse.check_sparse_tensor_invariants.enable()
    torch.Tensor.sqrt = _sqrt
    torch.Tensor.sqrt_ = lambda self: self.copy_(_sqrt(self))
    main()
