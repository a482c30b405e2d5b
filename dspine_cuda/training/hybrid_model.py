"""A plain trainable decoder of the Qwen3.5-MoE family (text): Gated DeltaNet and attention layers, each with experts.

Parameters carry the family's official names (without `model.language_model.`), so `state_dict` is a checkpoint. What training
needs and the inference decoders do not: gradients, packed rows whose documents never see each other, router statistics. Every
expert is computed for every token and unchosen ones get weight zero: at this size dense products beat sorting, need no
synchronisation, and their gradients are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.common.errors import CheckpointError
from dspine_cuda.training.hybrid_shape import PREFIX, HybridShape, read_shape, write_cards

CHUNK = 64  # tokens solved at once by the chunked delta rule
_NORM_EPS = 1e-6  # inside the l2 norm of queries and keys


@dataclass
class Rows:
    """What a packed batch means for the layers. positions int [B, S] restart at 0 in every document (and on padding)."""

    positions: Tensor
    mask: Tensor = field(init=False)  # bool [B, 1, S, S], True = visible
    segment: Tensor = field(init=False)  # int [B, S], document number within the row

    def __post_init__(self) -> None:
        self.segment = (self.positions == 0).int().cumsum(dim=1)
        length = self.positions.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.positions.device).tril()
        self.mask = ((self.segment[:, :, None] == self.segment[:, None, :]) & causal).unsqueeze(1)


@dataclass(frozen=True)
class Routing:
    """One layer's router: logits float32 [T, E], chosen int [T, k]."""

    logits: Tensor
    chosen: Tensor


class Norm(nn.Module):
    """RMSNorm whose weight is stored around zero."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm of a head, times silu of the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight
        return (normed.float() * F.silu(gate.float())).to(x.dtype)


class Conv(nn.Module):
    """Holds the depthwise weight [C, 1, width] under its official name."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def unit(x: Tensor) -> Tensor:
    """l2-normalised last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


class DeltaNet(nn.Module):
    """Gated DeltaNet (`docs/algorithms.md` 3) over whole rows."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, heads = shape.hidden_size, shape.linear_num_value_heads
        channels = 2 * shape.key_dim + shape.value_dim
        self.in_proj_qkv, self.in_proj_z = _linear(hidden, channels), _linear(hidden, shape.value_dim)
        self.in_proj_b, self.in_proj_a = _linear(hidden, heads), _linear(hidden, heads)
        self.conv1d = Conv(channels, shape.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.zeros(heads))
        self.norm = GatedNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = _linear(shape.value_dim, hidden)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> convolution inputs [..., C], log decay float32 and write strength float32 [..., Hv]."""
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return self.in_proj_qkv(x), decay, self.in_proj_b(x).sigmoid().float()

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved [..., C] -> q, k float32 [..., Hv, Dk] (unit norm, q scaled, repeated for value heads), v [..., Hv, Dv]."""
        shape = self.shape
        q, k, v = mixed.split([shape.key_dim, shape.key_dim, shape.value_dim], dim=-1)
        repeat = shape.linear_num_value_heads // shape.linear_num_key_heads
        q = unit(q.unflatten(-1, (-1, shape.linear_key_head_dim))) * shape.linear_key_head_dim**-0.5
        k = unit(k.unflatten(-1, (-1, shape.linear_key_head_dim)))
        if repeat > 1:
            q, k = q.repeat_interleave(repeat, dim=-2), k.repeat_interleave(repeat, dim=-2)
        return q, k, v.float().unflatten(-1, (-1, shape.linear_value_head_dim))

    def finish(self, core: Tensor, x: Tensor) -> Tensor:
        """Recurrence output [..., Hv, Dv] -> [..., H]."""
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.shape.linear_value_head_dim))
        return self.out_proj(self.norm(core.to(x.dtype), gate).flatten(-2))

    def convolve(self, inputs: Tensor, segment: Tensor) -> Tensor:
        """Causal depthwise convolution with silu; a tap that would reach into another document reads zero."""
        weight = self.conv1d.weight[:, 0]
        width = weight.shape[1]
        out = inputs * weight[:, width - 1]
        for back in range(1, width):
            earlier = F.pad(inputs, (0, 0, back, 0))[:, : inputs.shape[1]]
            same = F.pad(segment, (back, 0))[:, : inputs.shape[1]] == segment
            out = out + torch.where(same[..., None], earlier, 0) * weight[:, width - 1 - back]
        return F.silu(out)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        inputs, decay, beta = self.project(x)
        q, k, v = self.heads(self.convolve(inputs, rows.segment))
        core, _ = chunked_delta_rule(q, k, v, decay, beta, rows.segment)
        return self.finish(core, x)


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 3, 10 and 7 chunk after chunk. q, k [B, S, H, Dk], v [B, S, H, Dv], decay, beta [B, S, H], float32;
    segment int [B, S] -> outputs [B, S, H, Dv] and the last state [B, H, Dk, Dv].

    A token sees the state only if no document starts between it and the state; pairs of different documents are masked.
    """
    batch, length, heads, _ = q.shape
    pad = -length % CHUNK
    if pad:  # log decay 0 and beta 0 leave the state alone
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
        decay, beta = (F.pad(t, (0, 0, 0, pad)) for t in (decay, beta))
        segment = torch.cat([segment, segment[:, -1:].expand(-1, pad)], dim=1)
    q, k, v = (t.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous() for t in (q, k, v))  # [N, B, H, C, D]
    decay, beta = (t.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2) for t in (decay, beta))  # [N, B, H, C]
    seg = segment.unflatten(1, (-1, CHUNK)).permute(1, 0, 2)  # [N, B, C]
    before = torch.cat([segment.new_zeros(1, batch), seg[:-1, :, -1]])  # document of the state that enters each chunk
    total = decay.cumsum(dim=-1)
    visible = (seg[..., :, None] == seg[..., None, :]) & torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # masked before the exponential: above the diagonal the difference is positive
    pairs = torch.where(visible[:, :, None], total[..., :, None] - total[..., None, :], float("-inf")).exp()
    entering = total.exp() * (seg == before[..., None])[:, :, None]  # what is left of the entering state at each token
    leaving = (total[..., -1:] - total).exp() * (seg == seg[..., -1:])[:, :, None]
    kept = entering[..., -1][..., None, None]
    system = (beta[..., None] * (k @ k.mT) * pairs).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * entering)[..., None] * k], dim=-1)
    solved = unit_lower_solve(system, right)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inner, query, key = (q @ k.mT) * pairs, q * entering[..., None], (k * leaving[..., None]).mT
    state = q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    outputs = []
    for n in range(q.shape[0]):
        z = values[n] - reads[n] @ state
        outputs.append(query[n] @ state + inner[n] @ z)
        state = state * kept[n] + key[n] @ z
    core = torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return core[:, :length], state


def unit_lower_solve(strict: Tensor, right: Tensor) -> Tensor:
    """(I + strict)^-1 right for strictly lower triangular [..., C, C], C a power of two: halves solved one after the other,
    both diagonal blocks of a level inverted together. As stable as substitution, and nothing but products."""
    size = strict.shape[-1]
    inverse = torch.ones(*strict.shape[:-1], 1, device=strict.device, dtype=strict.dtype).unsqueeze(-1)  # [..., blocks, 1, 1]
    block = 1
    while block < size:
        count = size // (2 * block)
        tiles = strict.unflatten(-1, (count, 2, block)).unflatten(-4, (count, 2, block))  # [..., n, 2, b, n, 2, b]
        lower = tiles[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., n, b, b]
        first, second = inverse.unflatten(-3, (count, 2)).unbind(dim=-3)
        corner = -(second @ lower @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        block *= 2
    return inverse.squeeze(-3) @ right


class Attention(nn.Module):
    """Grouped attention with head norms, rotation of the first `rotary_dim` components, and an output gate."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, size = shape.hidden_size, shape.head_dim
        self.q_proj = _linear(hidden, 2 * shape.num_attention_heads * size)
        self.k_proj, self.v_proj = (_linear(hidden, shape.num_key_value_heads * size) for _ in range(2))
        self.o_proj = _linear(shape.num_attention_heads * size, hidden)
        self.q_norm, self.k_norm = Norm(size, shape.rms_norm_eps), Norm(size, shape.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, S, H] -> q [B, heads, S, D], k, v [B, K/V heads, S, D], gate [B, S, heads * D]."""
        size = self.shape.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        q, k = self.q_norm(q), self.k_norm(self.k_proj(x).unflatten(-1, (-1, size)))
        cos, sin = rotary_tables(self.shape, positions, x.dtype)
        q, k = rotate_part(q, cos, sin), rotate_part(k, cos, sin)
        v = self.v_proj(x).unflatten(-1, (-1, size))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        """Masked attention, gate and output projection. mask bool, broadcast to [B, heads, S, keys]."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)
        return self.o_proj(mixed * gate.sigmoid())

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.attend(*self.project(x, rows.positions), rows.mask)


def rotary_tables(shape: HybridShape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, 1, rotary_dim], half-split."""
    steps = torch.arange(0, shape.rotary_dim, 2, device=positions.device, dtype=torch.float32) / shape.rotary_dim
    angle = positions[..., None, None].float() * shape.rope_theta**-steps
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first components of [B, S, heads, D]."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


class Router(nn.Module):
    """The gate's weight [E, H]; softmax over all experts, the k largest renormalised."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size)), shape.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """[T, H] -> dense weights [T, E] (zero where not chosen), and what was chosen."""
        logits = F.linear(x, self.weight).float()
        probabilities, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        shares = (probabilities / probabilities.sum(dim=-1, keepdim=True)).to(x.dtype)
        return torch.zeros_like(logits, dtype=x.dtype).scatter(-1, chosen, shares), Routing(logits, chosen)


class Experts(nn.Module):
    """gate_up_proj [E, 2 I, H] (gate rows, then up rows) and down_proj [E, H, I]."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        count, inner, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """[T, H] with dense weights [T, E] -> [T, H]."""
        count, double, hidden = self.gate_up_proj.shape
        both = F.linear(x, self.gate_up_proj.view(count * double, hidden)).view(-1, count, 2, double // 2)
        inner = F.silu(both[:, :, 0]) * both[:, :, 1] * weights[..., None]
        return inner.flatten(1) @ self.down_proj.transpose(1, 2).reshape(-1, hidden)


class SharedExpert(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.shared_expert_intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = _linear(hidden, inner), _linear(hidden, inner), _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoeBlock(nn.Module):
    """Routed experts plus a gated shared one."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = Router(shape), Experts(shape), SharedExpert(shape)
        self.shared_expert_gate = _linear(shape.hidden_size, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        flat = x.flatten(0, -2)
        weights, routing = self.gate(flat)
        out = self.experts(flat, weights) + self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return out.view_as(x), routing


class Layer(nn.Module):
    """Norm, mixer, norm, experts; residuals around both."""

    def __init__(self, shape: HybridShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.attention = shape.is_attention(index)
        if self.attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.mlp = MoeBlock(shape)
        self.dropout = 0.0  # of both residual branches, in training only

    @property
    def mixer(self) -> Attention | DeltaNet:
        return self.self_attn if self.attention else self.linear_attn

    def experts(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The second half."""
        out, routing = self.mlp(self.post_attention_layernorm(x))
        return x + out, routing

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Routing]:
        mixed = self.mixer(self.input_layernorm(x), rows)
        if self.dropout == 0.0 or not self.training:
            return self.experts(x + mixed)
        x = x + F.dropout(mixed, self.dropout)
        out, routing = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(out, self.dropout), routing


class HybridModel(nn.Module):
    """The decoder without a head of its own: the embedding serves both ends."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.run_layer = lambda layer, x, rows: layer(x, rows)  # replaced by `compile_layers`

    def compile_layers(self) -> None:
        """Run layers under torch.compile: two graphs, shared by layers of a kind."""
        self.run_layer = torch.compile(lambda layer, x, rows: layer(x, rows), dynamic=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor], list[Routing]]:
        """int [B, S] twice (positions restart at 0 in each document) -> final-normed hidden [B, S, H], the outputs of layers
        `taps`, and every layer's routing."""
        x, rows = self.embed_tokens(tokens), Rows(positions)
        outputs, routings = {}, []
        for index, layer in enumerate(self.layers):
            x, routing = self.run_layer(layer, x, rows)
            routings.append(routing)
            if index in taps:
                outputs[index] = x
        return self.norm(x), [outputs[tap] for tap in taps], routings

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> float32 [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight).float()


def new_model(shape: HybridShape, seed: int) -> HybridModel:
    """Fresh float32 weights on the CPU, the same for a seed on any machine. N(0, 0.02), residual outputs scaled down by
    sqrt(2 x layers); decays spread as the family spreads them."""
    generator = torch.Generator().manual_seed(seed)
    model = HybridModel(shape)
    shrink = (2 * shape.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 16, generator=generator).log())
            elif name.endswith("conv1d.weight"):
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            elif parameter.ndim > 1:
                scale = shrink if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")) else 1.0
                parameter.normal_(std=0.02 * scale, generator=generator)
    return model


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> HybridModel:
    """A Hugging Face folder of the family (safetensors), as a frozen model."""
    from dspine_cuda.training.target import read_weights

    model = HybridModel(read_shape(folder))
    weights = {name.removeprefix("language_model."): tensor for name, tensor in read_weights(folder).items()}
    weights = {n: t for n, t in weights.items() if not n.startswith(("visual.", "mtp.")) and n != "lm_head.weight"}
    wrong = sorted(set(weights) ^ set(model.state_dict()))
    if wrong:
        raise CheckpointError(f"{folder}: tensors do not fit the family: {', '.join(wrong[:6])}")
    model.load_state_dict(weights)
    return model.to(device, dtype).eval().requires_grad_(False)


def save_folder(model: HybridModel, folder: Path, tokenizer: Path | None = None) -> Path:
    """An ordinary bfloat16 Hugging Face folder, tokenizer files copied from `tokenizer`."""
    import shutil

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_cards(model.shape, folder)
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(tokenizer / name, folder / name)
    return folder
