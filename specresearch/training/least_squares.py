"""A closed-form start for EAGLE-3: the head as the best linear recurrence of the target's last feature.

Write f_t for the target's feature of token t after its final norm, e_t for the normed embedding, x_t for the normed features
that the head reads. Ridge regressions over the training part

    f_{t+1} = M e_{t+1} + R f_t        what one pass of the layer should do to its state,
    f_{t+1} = M e_{t+1} + A x_t        what it should do to the projected features,

and the third, on all of them, says in which directions U predictions differ most. With R' = U'RU the head gets
fc = U R'^+ U'A, and attention heads that see their own place only and add U (U'M e + (R' - 1) U' state) to the state. The
target's vocabulary matrix reads the result; the MLP and the other heads begin silent. So the head begins where gradient
steps take long to bring it: above all, the token, which comes into an EAGLE-3 layer through attention alone, counts from
the first step on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specresearch.models.eagle import EagleHead
from specresearch.training.packs import Library, Pack, grouped

RIDGE = 3e-3  # share of the mean variance added to each
INVERSE_RIDGE = 1e-2  # of R
OWN_LOGIT = 18.0  # of the heads that see their own place, there: other tokens come to a few


@torch.no_grad()
def start(head: EagleHead, library: Library, columns: list[int], normed: list[int], matrix: Tensor, heads: int) -> None:
    """Set `head` in place. `columns`, `normed`: where its taps and f stand; `matrix` [V, H] the target's vocabulary matrix."""
    mid: Any = head.midlayer
    for norm in (mid.input_layernorm, mid.hidden_norm, mid.post_attention_layernorm, *getattr(head, "fc_norm", ())):
        norm.weight.fill_(1.0)
    gram, moments, size, count = _moments(head, library, columns, normed)
    width, read = head.config.hidden_size, len(columns)
    x, e, f = torch.arange(read), torch.arange(read, read + width), torch.arange(read + width, read + 2 * width)
    both, known = torch.cat([e, f]), torch.cat([x, e])
    token, recur = _ridge(gram[both][:, both], moments[both], RIDGE).t().split(width, 1)  # M, R
    project = _ridge(gram[x][:, x], moments[x] - gram[x][:, e] @ token.t(), RIDGE).t()  # A
    best = _ridge(gram[known][:, known], moments[known], RIDGE)
    spread = torch.linalg.eigh(best.t() @ gram[known][:, known] @ best)[1]
    u = spread[:, -heads * head.config.head_dim :]  # [H, rows], the directions in which predictions differ most
    inner = u.t() @ recur @ u
    project = u @ _ridge(inner.t() @ inner, inner.t() @ u.t() @ project, INVERSE_RIDGE)
    head.fc.weight.copy_(project)
    state = float((project @ gram[x][:, x] @ project.t()).diagonal().mean().div(count).sqrt())
    mid.hidden_norm.weight.fill_(state)
    _own_place(head, u, torch.cat([u.t() @ token, inner @ u.t() - u.t()], 1))
    mid.mlp.down_proj.weight.zero_()
    head.norm.weight.fill_(size)
    head.lm_head.weight.copy_(matrix[head.vocabulary.kept])


def _own_place(head: EagleHead, u: Tensor, mapping: Tensor) -> None:
    """The first heads see their own place and add u `mapping` (token, state) to the state; u [H, rows], mapping [rows, 2H]."""
    attention: Any = head.midlayer.self_attn
    width, rows = u.shape
    sharpness = (OWN_LOGIT / head.config.head_dim**0.5) ** 0.5
    look = torch.linalg.qr(torch.randn(width, rows, dtype=torch.float64))[0].t()
    for name in ("q_proj", "k_proj"):
        weight = getattr(attention, name).weight
        weight[:rows] = torch.cat([sharpness * look, torch.zeros_like(look)], 1).to(weight)
    attention.v_proj.weight[:rows] = mapping.to(attention.v_proj.weight)
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, :rows] = u.to(attention.o_proj.weight)


def _moments(
    head: EagleHead, library: Library, columns: list[int], normed: list[int]
) -> tuple[Tensor, Tensor, float, int]:
    """Over the answers of the training part: Z'Z and Z'f_{t+1} of Z = (x_t, e_{t+1}, f_t), and the typical size of f."""
    weight = head.fc.weight
    gram: Any = 0.0
    moments: Any = 0.0
    sizes = []
    for group in grouped(library.part(held_out=False), 4000):
        z, y = _pairs(head, library.pack(group).to(weight.device, weight.dtype), columns, normed)
        gram, moments = gram + z.t() @ z, moments + z.t() @ y
        sizes.append(y.pow(2).mean(-1).sqrt())
    return gram.double(), moments.double(), float(torch.cat(sizes).median()), sum(map(len, sizes))


def _pairs(head: EagleHead, pack: Pack, columns: list[int], normed: list[int]) -> tuple[Tensor, Tensor]:
    places = ((pack.left >= 2) & pack.answer.roll(-2)).nonzero()[:, 0]
    read = pack.features[places][:, columns]
    norms: Any = getattr(head, "fc_norm", None)
    if norms is not None:
        read = torch.cat([n(part) for n, part in zip(norms, read.split(head.config.target_hidden_size, -1))], -1)
    token = head.midlayer.input_layernorm(head.embed_tokens(pack.tokens[places + 1]))
    return torch.cat([read, token, pack.features[places][:, normed]], -1), pack.features[places + 1][:, normed]


def _ridge(gram: Tensor, moments: Tensor, share: float) -> Tensor:
    """argmin over W of |Z W - Y|^2 + ridge |W|^2, from Z'Z and Z'Y; the ridge is a share of the mean of Z'Z's diagonal."""
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + share * gram.diagonal().mean() * eye, moments)
