"""Muon for matrices (momentum, orthogonalised by Newton-Schulz), AdamW for the rest, one cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class MuonAdam:
    """Two optimisers with one step count. Matrices of one shape are orthogonalised together.

    Args:
        matrices: parameters for Muon; convolutions count as matrices [out, rest].
        others: parameters for AdamW.
        muon_rate, adam_rate: peak learning rates.
        steps: length of the cosine, after `warm_up` linear steps.
        decay: Muon's weight decay per unit of learning rate.
    """

    def __init__(
        self,
        matrices: Sequence[Parameter],
        others: Sequence[Parameter],
        *,
        muon_rate: float,
        adam_rate: float,
        steps: int,
        warm_up: int,
        decay: float,
    ) -> None:
        self._rates = (muon_rate, adam_rate)
        self._steps, self._warm_up, self._decay = steps, warm_up, decay
        self.others = list(others)
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=adam_rate,
            betas=(0.9, 0.95),
        )
        self._groups: dict[tuple[int, int], list[Parameter]] = {}
        for parameter in matrices:
            rows, columns = parameter.shape[0], parameter[0].numel()
            self._groups.setdefault((min(rows, columns), max(rows, columns)), []).append(parameter)
        self._momentum = {shape: torch.zeros(len(own), *shape) for shape, own in self._groups.items()}
        self.step_count = 0

    def step(self) -> None:
        """One step from the gradients; clears them."""
        done = self.step_count / self._steps
        share = min(1.0, (self.step_count + 1) / self._warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self._rates[1] * share
        self._adam.step()
        self._muon(self._rates[0] * share, min(0.95, 0.85 + 0.1 * self.step_count / 200))
        self._adam.zero_grad(set_to_none=True)
        for own in self._groups.values():
            for parameter in own:
                parameter.grad = None
        self.step_count += 1

    @torch.no_grad()
    def _muon(self, rate: float, momentum: float) -> None:
        for shape, own in self._groups.items():
            turned = [parameter.shape[0] > parameter[0].numel() for parameter in own]
            gradients = []
            for parameter, turn in zip(own, turned, strict=True):
                assert parameter.grad is not None
                matrix = parameter.grad.reshape(parameter.shape[0], -1)
                gradients.append(matrix.T if turn else matrix)
            gradient = torch.stack(gradients)
            self._momentum[shape].lerp_(gradient, 1 - momentum)
            update = orthogonalise(gradient.lerp(self._momentum[shape], momentum))
            for parameter, turn, matrix in zip(own, turned, update, strict=True):
                rows, columns = parameter.shape[0], parameter[0].numel()
                delta = (matrix.T if turn else matrix).reshape(parameter.shape)
                parameter.mul_(1 - rate * self._decay)
                parameter.add_(delta, alpha=-rate * max(1.0, rows / columns) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly."""
        return {
            "adam": self._adam.state_dict(),
            "momentum": list(self._momentum.values()),
            "step": self.step_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._adam.load_state_dict(state["adam"])
        for own, saved in zip(self._momentum.values(), state["momentum"], strict=True):
            own.copy_(saved)
        self.step_count = state["step"]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Five Newton-Schulz steps in bfloat16: [n, rows, columns], rows <= columns, singular values near 1."""
    x = (matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.float()
