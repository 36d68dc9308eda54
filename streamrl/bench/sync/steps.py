"""How much a step of training changes: of a synthetic model under AdamW, and of the quickstart's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from streamrl.errors import StreamRLError
from streamrl.sync.delta import encode

VALUES = 16 << 20
"""Of the synthetic model: one bucket of 32 MiB."""
DEVIATION = 0.02
QUICKSTART_TIMEOUT_S = 600.0
"""That the short run may take, warm-up and all."""


def adamw_deltas(lr: float, steps: int) -> Iterator[tuple[float, float]]:
    """(values that change, bytes of their code), each as a share of all, for each step.

    fp32 master weights from a normal distribution of deviation 0.02, which go out as bf16. Each gradient is half that
    of the step before and half new noise, so that AdamW's normalised steps have the size that they have in training.
    """
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(VALUES, generator=generator) * DEVIATION)
    optimizer = torch.optim.AdamW([master], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    gradient = torch.randn(VALUES, generator=generator)
    sent = _bits(master)
    for _ in range(steps):
        gradient = 0.5 * gradient + 0.5 * torch.randn(VALUES, generator=generator)
        master.grad = gradient
        optimizer.step()
        new = _bits(master)
        code = encode(_memory(sent), _memory(new), 2)
        payload = code.nbytes if code is not None else new.nbytes
        yield float((sent != new).float().mean()), payload / new.nbytes
        sent = new


def quickstart_fractions(dtype: str, steps: int) -> list[float]:
    """Bytes that travel with ``sync.encoding=delta``, as a share of all, for each step of a short real run.

    Raises ``StreamRLError`` where the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="weights-bench-") as folder:
        settings = ["sync.transport=zmq", "sync.encoding=delta", f"model.dtype={dtype}", "wandb=disabled"]
        command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", "quickstart", "--steps", str(steps)]
        command += ["--run-dir", f"{folder}/run", *settings]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=QUICKSTART_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise StreamRLError(f"the quickstart in {dtype} took more than {QUICKSTART_TIMEOUT_S:g} s") from None
        if run.returncode:
            raise StreamRLError(f"the quickstart in {dtype} failed: {(run.stderr or run.stdout).strip()[-500:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["sync/delta_fraction"] for line in lines]


def _bits(master: torch.Tensor) -> torch.Tensor:
    return master.detach().to(torch.bfloat16).view(torch.int16)


def _memory(bits: torch.Tensor) -> memoryview:
    return bits.view(torch.uint8).numpy().data
