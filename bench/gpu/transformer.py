"""Stage "transformer": one of a billion parameters, or as many as fit on the disk.

It is trained with a save every ten steps, and resumed.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
from torch import nn

import flowstone as fs
from bench.gpu.accelerator import opened
from bench.gpu.loop import Told, folder
from bench.gpu.options import Options, emit, parse

EVERY, STEPS = 10, 40


def build(options: Options) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model on the host, its input, and its expected output."""
    width, layers, length = (64, 2, 16) if options.simulate else (2048, 20, 512)
    if not options.simulate:  # three numbers of four bytes for each of a layer's 12 width^2 parameters
        layers = max(1, min(layers, options.state_bytes // (12 * 12 * width**2)))
    layer = nn.TransformerEncoderLayer(
        width, max(1, width // 128), dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    made = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    torch.manual_seed(0)
    return made, torch.randn(2, length, width), torch.randn(2, length, width)


def main() -> None:
    options = parse()
    with opened(options) as device:
        model, x, expected = build(options)
        if not options.simulate:
            model.to("cuda:0")
            x, expected = x.to("cuda:0"), expected.to("cuda:0")
        device.module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        emit("parameters", sum(parameter.numel() for parameter in model.parameters()) / 1e6, "million")

        def step() -> torch.Tensor:
            kind = "cpu" if options.simulate else "cuda"
            with torch.autocast(kind, torch.bfloat16):
                loss = (model(x) - expected).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        for _ in range(3):
            step()
        device.slots(optimizer)
        events, where = Told(), folder(options, "transformer")
        usual = _seconds(device, step, EVERY)
        with fs.Checkpointer(
            where, keep=1, on_event=events.seen.append, on_error="continue", max_unsaved_steps=None
        ) as checkpointer:
            blocked, begin = [], perf_counter()
            for number in range(1, STEPS + 1):
                step()
                if number % EVERY == 0:
                    started = perf_counter()
                    checkpointer.save(number, {"model": model, "optimizer": optimizer, "step": number})
                    blocked.append(1e3 * (perf_counter() - started))
            device.synchronize()
            trained = perf_counter() - begin
            checkpointer.wait()
            device.synchronize()
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            report = checkpointer.load({"model": model, "optimizer": optimizer, "step": 0})
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
        emit("saved, overwritten, loaded: the same bits", same and report.step == STEPS)
        emit("saves, false alarms", events.failed(), "", of=len(blocked))
        emit("save blocked", median(blocked), "ms", all=blocked)
        emit("fence, for each save", 1e3 * events.fences_s() / len(blocked), "ms")
        emit("steps with saves, of steps without", trained / STEPS / usual, "", usual_s=usual)
        emit("waited for earlier saves", sum(1 for event in events.seen if getattr(event, "waited_s", 0) > 0.001))


def _seconds(device: object, step: object, count: int) -> float:
    device.synchronize()  # type: ignore[attr-defined]
    begin = perf_counter()
    for _ in range(count):
        step()  # type: ignore[operator]
    device.synchronize()  # type: ignore[attr-defined]
    return (perf_counter() - begin) / count
