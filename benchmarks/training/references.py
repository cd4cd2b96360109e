"""The algorithms once more, in plain PyTorch and by the papers: what the recipes' accuracies are compared with.

Nothing here imports the package. Each function trains a dense model to a sparsity with the loop, the optimizer and the
learning rate that the recipes have (Adam, linear to zero), prunes over the first half of the steps and trains with
fixed masks over the second. They are written to be read, not to be quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batches = Iterable[tuple[Tensor, Tensor]]
UPDATES = 20  # of the masks, over the first half
RATE = 1e-3


@dataclass
class State:
    """What an algorithm may look at when it chooses masks: weights, gradients, and what it keeps itself."""

    weights: dict[str, nn.Parameter]
    masks: dict[str, Tensor]
    kept: dict[str, Tensor]
    optimizer: torch.optim.Adam

    def kill(self, name: str) -> None:
        """Zero what is pruned of a weight, with its moments."""
        mask = self.masks[name]
        self.weights[name].data.mul_(mask)
        for key, value in self.optimizer.state.get(self.weights[name], {}).items():
            if key in {"exp_avg", "exp_avg_sq"}:
                value.mul_(mask)


def cubic(share: float, final: float, start: float = 0.05) -> float:
    """Return the sparsity at a share of the way."""
    start = min(start, final)
    return final - (final - start) * (1 - min(1.0, share)) ** 3


def lowest(scores: dict[str, Tensor], sparsity: float, *, together: bool) -> dict[str, Tensor]:
    """Return masks without the lowest scores, of all layers together or of each alone."""
    if together:
        every = torch.cat([score.flatten() for score in scores.values()])
        order = every.argsort(stable=True)[: round(sparsity * every.numel())]
        flat = torch.ones_like(every, dtype=torch.bool)
        flat[order] = False
        parts = flat.split([score.numel() for score in scores.values()])
        return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}
    return {name: lowest({name: score}, sparsity, together=True)[name] for name, score in scores.items()}


def erk(shapes: dict[str, torch.Size], sparsity: float) -> dict[str, float]:
    """Return the density of each layer by Erdős-Rényi-Kernel."""
    odds = {name: sum(shape) / shape.numel() for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        left = (1 - sparsity) * sum(s.numel() for s in shapes.values()) - sum(shapes[n].numel() for n in dense)
        scale = left / sum(odds[name] * shapes[name].numel() for name in shapes if name not in dense)
        over = {name for name in shapes if name not in dense and scale * odds[name] > 1}
        if not over:
            return {name: 1.0 if name in dense else scale * odds[name] for name in shapes}
        dense |= over


# ---------------------------------------------------------------------- gradual


def trained(
    model: nn.Module,
    batches: Batches,
    steps: int,
    choose: Callable[[State, float], dict[str, Tensor] | None],
    watch: Callable[[State], None] | None = None,
) -> nn.Module:
    """Train, asking for new masks UPDATES times over the first half; `watch` sees every gradient."""
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    state = State(
        weights,
        {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()},
        {name: torch.zeros_like(weight) for name, weight in weights.items()},
        torch.optim.Adam(model.parameters(), lr=RATE),
    )
    moments = {round(update * (steps / 2) / UPDATES) for update in range(UPDATES + 1)}
    model.train()
    for step, (inputs, labels) in enumerate(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = RATE + (1e-7 - RATE) * step / steps
        state.optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if watch is not None:
            watch(state)
        if step in moments:
            made = choose(state, min(1.0, step / (steps / 2)))
            if made is not None:
                state.masks = made
        for name, weight in weights.items():
            if weight.grad is not None:
                weight.grad.mul_(state.masks[name])
            state.kill(name)
        state.optimizer.step()
        for name in weights:
            state.kill(name)
    return model.eval()


def magnitude(model: nn.Module, batches: Batches, steps: int, sparsity: float, *, together: bool = True) -> nn.Module:
    """Gradual magnitude pruning (Zhu and Gupta, 2017)."""

    def choose(state: State, share: float) -> dict[str, Tensor]:
        scores = {name: weight.detach().abs() for name, weight in state.weights.items()}
        return lowest(scores, cubic(share, sparsity), together=together)

    return trained(model, batches, steps, choose)


def by_layer(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """Gradual magnitude pruning, each layer alone."""
    return magnitude(model, batches, steps, sparsity, together=False)


def movement(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """Movement pruning (Sanh et al., 2020): scores gather ``-lr · weight · gradient``."""

    def watch(state: State) -> None:
        rate = state.optimizer.param_groups[0]["lr"]
        for name, weight in state.weights.items():
            state.kept[name] -= rate * weight.detach() * weight.grad

    def choose(state: State, share: float) -> dict[str, Tensor]:
        return lowest(state.kept, cubic(share, sparsity), together=False)

    return trained(model, batches, steps, choose, watch)


def _fisher_rows(size: int) -> Callable[[State], None]:
    def watch(state: State) -> None:
        rows = state.kept.setdefault("rows", {})  # type: ignore[arg-type]
        for name, weight in state.weights.items():
            grads = rows.setdefault(name, [])  # type: ignore[attr-defined]
            grads.append((weight.grad * state.masks[name]).flatten().clone())  # type: ignore[operator]
            del grads[:-size]

    return watch


def mfac(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """M-FAC (Frantar et al., 2021): saliency ``w² / 2 (F⁻¹)_ii`` with F of the last 64 gradients of a layer."""
    damp = 1e-5

    def choose(state: State, share: float) -> dict[str, Tensor]:
        scores = {}
        for name, weight in state.weights.items():
            rows = torch.stack(state.kept["rows"][name]).double()  # type: ignore[index, call-overload]
            inner = len(rows) * torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + rows @ rows.T / damp
            solved = torch.linalg.solve(inner, rows)
            diagonal = 1 / damp - (rows * solved).sum(0) / damp**2
            saliency = weight.detach().flatten().double().square() / (2 * diagonal.clamp(min=1e-12))
            saliency[~state.masks[name].flatten()] = -1
            scores[name] = saliency.view_as(weight).float()
        return lowest(scores, cubic(share, sparsity), together=True)

    return trained(model, batches, steps, choose, _fisher_rows(64))


def obs(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """OBS by blocks of 50 weights (oBERT, Kurtic et al., 2022): as above, and the survivors make up for the pruned."""
    damp, size = 1e-5, 50

    def inverse(rows: Tensor) -> Tensor:
        blocks = nn.functional.pad(rows, (0, -rows.shape[1] % size)).view(len(rows), -1, size).transpose(0, 1)
        fisher = blocks.transpose(1, 2) @ blocks / len(rows)
        return torch.linalg.inv(fisher + damp * torch.eye(size, dtype=rows.dtype, device=rows.device))

    def choose(state: State, share: float) -> dict[str, Tensor]:
        inverses = {n: inverse(torch.stack(state.kept["rows"][n]).double()) for n in state.weights}  # type: ignore[index, call-overload]
        scores = {}
        for name, weight in state.weights.items():
            diagonal = inverses[name].diagonal(dim1=1, dim2=2).reshape(-1)[: weight.numel()]
            saliency = weight.detach().flatten().double().square() / (2 * diagonal.clamp(min=1e-12))
            saliency[~state.masks[name].flatten()] = -1
            scores[name] = saliency.view_as(weight).float()
        made = lowest(scores, cubic(share, sparsity), together=True)
        for name, weight in state.weights.items():
            gone = (state.masks[name] & ~made[name]).flatten()
            flat = weight.detach().flatten().double() * gone
            blocks = nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
            diagonal = inverses[name].diagonal(dim1=1, dim2=2)
            change = -torch.einsum("bij,bj->bi", inverses[name], blocks / diagonal).reshape(-1)[: flat.numel()]
            weight.data.add_((change.view_as(weight) * made[name]).to(weight.dtype))
        return made

    return trained(model, batches, steps, choose, _fisher_rows(256))


# ---------------------------------------------------------------------- dynamic


def rigl(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """RigL (Evci et al., 2020), spread by ERK: the smallest weights go, those of the largest gradient come."""
    shapes = {n: p.shape for n, p in model.named_parameters() if p.dim() > 1}
    densities = erk(shapes, sparsity)

    def choose(state: State, share: float) -> dict[str, Tensor]:
        made = {}
        fraction = 0.15 * (1 + torch.cos(torch.tensor(share * torch.pi)).item())
        for name, weight in state.weights.items():
            total = round(densities[name] * weight.numel())
            size = weight.detach().abs().flatten()
            if share == 0:
                keep = size.topk(total).indices
            else:
                moved = round(fraction * total)
                live = state.masks[name].flatten()
                keep = size.masked_fill(~live, -1).topk(total - moved).indices
                gradient = weight.grad.abs().flatten()  # type: ignore[union-attr]
                gradient[keep] = -1
                keep = torch.cat([keep, gradient.topk(moved).indices])
            flat = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
            flat[keep] = True
            made[name] = flat.view_as(weight)
        return made

    return trained(model, batches, steps, choose)


def acdc(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """AC/DC (Peste et al., 2021), spread by ERK: a dense warm-up, then dense and compressed epochs by turns."""
    shapes = {n: p.shape for n, p in model.named_parameters() if p.dim() > 1}
    densities = erk(shapes, sparsity)
    compressed = {3, 5, 8, 9, 10}  # of the ten epochs of the first half; the last dense phase is twice as long

    def choose(state: State, share: float) -> dict[str, Tensor]:
        if int(10 * share + 1e-6) in compressed:
            made = {}
            for name, weight in state.weights.items():
                kept = round(densities[name] * weight.numel())
                if bool(state.masks[name].all()):
                    score = weight.detach().abs()
                    made[name] = lowest({name: score}, 1 - kept / weight.numel(), together=True)[name]
                else:
                    made[name] = state.masks[name]
            return made
        for name, weight in state.weights.items():
            if not bool(state.masks[name].all()):  # a dense phase begins: the optimizer forgets
                state.optimizer.state.pop(weight, None)
        return {name: torch.ones_like(mask) for name, mask in state.masks.items()}

    return trained(model, batches, steps, choose)


def topkast(model: nn.Module, batches: Batches, steps: int, sparsity: float) -> nn.Module:
    """Top-KAST (Jayakumar et al., 2020): the largest weights compute, some more of them learn, all of those decay."""
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    backward = max(0.0, 1 - 2.5 * (1 - sparsity))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    moments = {round(update * (steps / 2) / UPDATES) for update in range(UPDATES + 1)}
    forward: dict[str, Tensor] = {}
    learning: dict[str, Tensor] = {}
    model.train()
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE + (1e-7 - RATE) * step / steps
        if step in moments:
            sizes = {name: weight.detach().abs() for name, weight in weights.items()}
            forward = lowest(sizes, sparsity, together=False)
            learning = forward if step == max(moments) else lowest(sizes, backward, together=False)
        optimizer.zero_grad()
        seen = {name: weight.detach() * forward[name] for name, weight in weights.items()}
        for name, value in seen.items():
            value.requires_grad_()
            seen[name] = value
        nn.functional.cross_entropy(torch.func.functional_call(model, seen, (inputs,)), labels).backward()
        for name, weight in weights.items():
            strength = torch.where(forward[name], 1.0, 1 / (1 - sparsity)) * 1e-4
            weight.grad = (seen[name].grad + weight.detach() * strength) * learning[name]  # type: ignore[operator]
        optimizer.step()
    for name, weight in weights.items():
        weight.data.mul_(forward[name])
    return model.eval()


REFERENCES: dict[str, Callable[[nn.Module, Batches, int, float], nn.Module]] = {
    "magnitude": magnitude,
    "gmp, layer by layer": by_layer,
    "movement": movement,
    "mfac": mfac,
    "obs": obs,
    "rigl": rigl,
    "acdc": acdc,
    "topkast": topkast,
}
"""By the name of the row that each is compared with."""

SPREAD = {
    "magnitude": "global, no floor",
    "gmp, layer by layer": "uniform",
    "movement": "uniform",
    "mfac": "global, no floor",
    "obs": "global, no floor",
    "rigl": "erk",
    "acdc": "erk",
    "topkast": "uniform",
}
"""How each spreads the sparsity over the layers; the recipes leave each layer something under a global threshold."""
