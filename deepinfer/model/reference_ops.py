"""Pure tensor functions of the reference network: norms, rotation, mHC coefficients, selection, attention.

Shapes use B sequences, T tokens, N compressed rows, h heads, D head width, m residual streams, H hidden width. Every
function is differentiable where its result is continuous, and runs on any torch device.
"""

import math

import torch

QUERY_CHUNK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """w * x / sqrt(mean(x^2) + eps), in float32, cast once to x's dtype."""
    wide = x.float()
    return (weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def rope_frequencies(config, compressed: bool, device) -> torch.Tensor:
    """float32 [R/2] angles per position step: f_i = theta^(-2i/R), with YaRN for layers of ratio > 0.

    YaRN: f' = f/factor * rho + f * (1 - rho), rho_i = clamp((i - low)/(high - low), 0, 1),
    low = max(floor(d(beta_fast)), 0), high = min(ceil(d(beta_slow)), R - 1),
    d(n) = R ln(original / (2 pi n)) / (2 ln theta). No magnitude scale.
    """
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    index = torch.arange(width // 2, dtype=torch.float64)
    frequencies = theta ** (-2 * index / width)
    if compressed:
        yarn = config.rope_scaling

        def dimension(turns: float) -> float:
            original = yarn["original_max_position_embeddings"]
            return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

        low = max(math.floor(dimension(yarn["beta_fast"])), 0)
        high = min(math.ceil(dimension(yarn["beta_slow"])), width - 1)
        rho = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies / yarn["factor"] * rho + frequencies * (1 - rho)
    return frequencies.float().to(device)


def rope(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotates the adjacent pairs of x's last 2 * len(frequencies) columns by position * frequency (float32 math).

    x: [..., D]; positions: broadcastable against x's leading axes.
    """
    angle = positions[..., None].float() * frequencies
    cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
    width = 2 * frequencies.numel()
    passed, rotated = x[..., :-width], x[..., -width:].float()
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((passed, pairs.to(x.dtype)), dim=-1)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[..., m, m] towards doubly stochastic: row softmax, then alternating column and row normalisation."""
    k = logits.softmax(-1) + eps
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


def mhc_coefficients(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [..., m], post [..., m] and mix [..., m, m] of one site, float32, from its streams [..., m, H].

    z = (f fn^T) * rsqrt(mean(f^2) + eps), projected first and scaled after, over all m * H values at once.
    """
    m = config.hc_mult
    flat = streams.float().flatten(-2)
    z = (flat @ fn.float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    scales = torch.cat([one.float().expand(count) for one, count in zip(scale, (m, m, m * m), strict=True)])
    z = z * scales + base.float()
    pre = z[..., :m].sigmoid() + config.hc_eps
    post = 2 * z[..., m : 2 * m].sigmoid()
    return pre, post, sinkhorn(z[..., 2 * m :].unflatten(-1, (m, m)), config.hc_sinkhorn_iters, config.hc_eps)


def collapse_streams(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_j pre_j S_j in float32, in the streams' dtype: [..., m, H] and [..., m] to [..., H]."""
    return (pre[..., None] * streams.float()).sum(-2).to(streams.dtype)


def update_streams(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """S'_k = post_k y + sum_i K[i, k] S_i in float32, in the streams' dtype."""
    mixed = mix.transpose(-1, -2) @ streams.float()
    return (post[..., None] * y.float()[..., None, :] + mixed).to(streams.dtype)


def visible_rows(queries: int, rows: int, ratio: int, device) -> torch.Tensor:
    """bool [T, N]: compressed row j is visible to query t when j < floor((t + 1) / ratio)."""
    count = (torch.arange(queries, device=device) + 1) // ratio
    return torch.arange(rows, device=device) < count[:, None]


def index_scores(queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """score(t, j) = sum_h w_{t,h} relu(iq_{t,h} . ik_j), float32 [B, T, N]; invisible rows are not masked here.

    queries [B, T, Hi, d], head_weights [B, T, Hi], keys [B, N, d].
    """
    keys = keys.float().transpose(-1, -2)
    chunks = []
    for q, w in zip(queries.float().split(QUERY_CHUNK, 1), head_weights.float().split(QUERY_CHUNK, 1), strict=True):
        products = (q.flatten(1, 2) @ keys).relu().unflatten(1, q.shape[1:3])
        chunks.append((w[..., None, :] @ products).squeeze(-2))
    return torch.cat(chunks, 1)


def top_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool like scores: the k largest of the last axis, ties to the lower index, never an entry of -inf."""
    allowed = scores > -torch.inf
    if k >= scores.shape[-1]:
        return allowed
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    tied = scores == threshold
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return (above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))) & allowed


def candidate_mask(scores: torch.Tensor, visible: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    """bool [B, T, N]: rows of the `blocks` best blocks of `block` rows; a block scores its best visible row.

    The block that holds the last visible row always belongs (it gets +inf).
    """
    rows = scores.shape[-1]
    masked = scores.masked_fill(~visible, -torch.inf)
    padded = torch.nn.functional.pad(masked, (0, -rows % block), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block)).amax(-1)
    last = (visible.sum(-1) - 1) // block
    newest = torch.arange(best.shape[-1], device=scores.device) == last[:, None]
    chosen = top_mask(best.masked_fill(newest, torch.inf), blocks)
    return chosen.repeat_interleave(block, -1)[..., :rows] & visible


def mask_to_ids(mask: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [..., k]: the set columns of a bool mask, ascending, padded with -1."""
    columns = mask.shape[-1]
    index = torch.arange(columns, device=mask.device, dtype=torch.int32).expand(mask.shape)
    index = torch.nn.functional.pad(index.masked_fill(~mask, columns), (0, max(k - columns, 0)), value=columns)
    ids = index.topk(k, dim=-1, largest=False, sorted=True).values
    return ids.masked_fill(ids == columns, -1)


def ids_to_mask(ids: torch.Tensor, columns: int) -> torch.Tensor:
    """bool [..., columns] from row ids [..., k]; -1 is no row."""
    mask = torch.zeros(*ids.shape[:-1], columns + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter(-1, ids.long().masked_fill(ids < 0, columns), True)[..., :columns]


def sink_softmax(logits: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """exp(a_n) / (sum exp(a) + exp(sink)) over the last axis, float32. logits [..., h, n], sink [h]."""
    column = sink.float()[:, None].expand(*logits.shape[:-1], 1)
    return torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1]


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    sink: torch.Tensor,
    window: int,
    compressed: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    ratio: int = 1,
    want_mass: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with one shared K = V: the sliding window and the selected compressed rows in one softmax.

    q [B, T, h, D] rotated; kv [B, T, D]; compressed [B, N, D]; selected bool [B, T, N] (a subset of the visible rows).
    Returns the output [B, T, h, D] before the inverse rotation and, when asked, the attention mass per compressed row
    summed over heads [B, T, N] (float32, detached).

    Queries go in chunks of whole windows: each block of `window` queries sees its own and the previous block of keys,
    and a chunk only meets the compressed rows that its last query can see.
    """
    tokens = q.shape[1]
    chunk = window * max(1, QUERY_CHUNK // window)
    outputs, masses = [], []
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        rows = 0 if compressed is None else end // ratio
        seen = compressed[:, :rows] if rows else None
        allowed = selected[:, start:end, :rows] if rows else None
        out, mass = _attend_chunk(q[:, start:end], kv, start, sink, window, seen, allowed, want_mass)
        outputs.append(out)
        if want_mass:
            masses.append(torch.nn.functional.pad(mass, (0, compressed.shape[1] - mass.shape[-1])))
    return torch.cat(outputs, 1), torch.cat(masses, 1) if want_mass else None


def _attend_chunk(q, kv, start, sink, window, compressed, allowed, want_mass):
    batch, tokens, heads, width = q.shape
    scale = width**-0.5
    blocks = -(-tokens // window)
    padded_q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, blocks * window - tokens))
    query_blocks = padded_q.reshape(batch, blocks, window * heads, width)
    keys = _two_block_keys(kv, start, blocks, window)
    scores = (query_blocks @ keys.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, blocks, window, heads, 2 * window)
    scores = scores.masked_fill(~_band(blocks, window, start, q.device)[None, :, :, None], -torch.inf)
    logits = scores.flatten(1, 2)[:, :tokens]
    if compressed is not None:
        far = (q.flatten(1, 2) @ compressed.transpose(-1, -2)).float() * scale
        far = far.view(batch, tokens, heads, -1).masked_fill(~allowed[:, :, None], -torch.inf)
        logits = torch.cat((logits, far), dim=-1)
    p = sink_softmax(logits, sink)
    near = torch.nn.functional.pad(p[..., : 2 * window], (0, 0, 0, 0, 0, blocks * window - tokens)).to(q.dtype)
    out = near.reshape(batch, blocks, window * heads, 2 * window) @ keys
    out = out.view(batch, blocks * window, heads, width)[:, :tokens]
    mass = None
    if compressed is not None:
        far = p[..., 2 * window :]
        out = out + (far.to(q.dtype).flatten(1, 2) @ compressed).view(out.shape)
        mass = far.detach().sum(2) if want_mass else None
    elif want_mass:
        mass = q.new_zeros(batch, tokens, 0, dtype=torch.float32)
    return out, mass


def _two_block_keys(kv: torch.Tensor, start: int, blocks: int, window: int) -> torch.Tensor:
    """[B, blocks, 2 * window, D]: the previous and the own block of keys of each block of queries from `start` on."""
    end = start + blocks * window
    own = torch.nn.functional.pad(kv[:, start:end], (0, 0, 0, max(end - kv.shape[1], 0)))
    before = kv[:, start - window : start] if start else torch.zeros_like(own[:, :window])
    stretch = torch.cat((before, own), 1).unflatten(1, (-1, window))
    return torch.cat((stretch[:, :-1], stretch[:, 1:]), 2)


def _band(blocks: int, window: int, start: int, device) -> torch.Tensor:
    """bool [blocks, window, 2 * window]: query i attends to key j when i < j <= i + window and the key exists."""
    i = torch.arange(window, device=device)[:, None]
    j = torch.arange(2 * window, device=device)
    band = ((j > i) & (j <= i + window)).expand(blocks, -1, -1)
    if start == 0:
        first = torch.arange(blocks, device=device)[:, None, None] == 0
        band = band & ~(first & (j < window))
    return band
