"""The executable specification of DeepSeek-V4.1: the whole sequence at once, no cache, differentiable, plain torch.

This is the file to read first. It favours the formula over speed, yet a small model trains with it on one GPU. Section
numbers in comments are those of the model description in docs. Images are not covered.

Shapes: ids [B, T]; streams [B, T, m, H]; pre_mix [B, T, m] (the `pre` handed from one site to the next).
"""

import dataclasses
from collections.abc import Collection

import torch
from deepinfer_hal.errors import BadCall
from deepinfer_hal.formats import fake_quantise_ste
from torch.nn.functional import embedding, linear, softplus
from torch.utils.checkpoint import checkpoint

from deepinfer.model import reference_draft
from deepinfer.model import reference_ops as ops
from deepinfer.model.engram_vocab import engram_multipliers, engram_primes
from deepinfer.model.reference_io import ReferenceConfig, load_checkpoint

TRAINING_TAPS = ("index_scores", "compressed_attention")
"""Taps that cost [B, T, N] memory each; recorded only when `wanted` names them."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Where the network rounds.

    act_quant: "fp8_32" rounds the inputs of the quantised linears (2.13), "none" does not.
    kv: "canonical" rounds stored window, compressed and index rows and the index queries; "float32" does not.
    dtype: of the residual streams.
    """

    act_quant: str = "none"
    kv: str = "canonical"
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        if self.act_quant not in ("none", "fp8_32"):
            raise BadCall(f"Numerics.act_quant is {self.act_quant!r}; it must be 'none' or 'fp8_32'")
        if self.kv not in ("canonical", "float32"):
            raise BadCall(f"Numerics.kv is {self.kv!r}; it must be 'canonical' or 'float32'")


@dataclasses.dataclass(frozen=True)
class Sources:
    """What later layers read from the nearest earlier source layer.

    compressed [B, N, D] and index_keys [B, N, d]: stored rows. select, candidates: bool [B, T, N].
    """

    compressed: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    select: torch.Tensor | None = None
    candidates: torch.Tensor | None = None


class Reference:
    """The network over a dictionary of float32 weights (`load_checkpoint`'s names); gradients reach those tensors.

    token_map: int32 [V], Engram's compressed ids (`engram_token_map`); required when the config has Engram layers.
    checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        weights: dict[str, torch.Tensor],
        numerics: Numerics | None = None,
        token_map: torch.Tensor | None = None,
        checkpoint_layers: bool = False,
    ):
        if config.engram_layer_ids and token_map is None:
            raise BadCall("this config has Engram layers: pass token_map (engram_vocab.engram_token_map makes it)")
        self.config = config
        self.weights = weights
        self.numerics = numerics or Numerics()
        self.token_map = token_map
        self.checkpoint_layers = checkpoint_layers
        self.engram_primes = engram_primes(config)

    @classmethod
    def from_folder(cls, folder, numerics: Numerics | None = None) -> "Reference":
        """From a checkpoint folder with its tokenizer.json."""
        from deepinfer.model.engram_vocab import engram_token_map

        config, weights = load_checkpoint(folder)
        token_map = engram_token_map(f"{folder}/tokenizer.json", config.vocab_size) if config.engram_layer_ids else None
        return cls(config, weights, numerics, token_map)

    # ---- 2.1 top level

    def forward(
        self,
        ids: torch.Tensor,
        taps: dict | None = None,
        select_override: dict[int, torch.Tensor] | None = None,
        wanted: Collection[str] | None = None,
    ) -> torch.Tensor:
        """float32 logits [B, T, V] of int token ids [B, T] at positions 0..T-1.

        taps: filled with inner tensors by name (streams.L, pre_mix.L, select.L, candidates.L, compressed_kv.L,
        index_keys.L, router.L.ids, router.L.weights, engram.L.rows, dspark.features, final_hidden, and on request
        index_scores.L, compressed_attention.L). wanted: first name parts to record; by default all but TRAINING_TAPS.
        select_override: index source layer -> rows to use instead of the selection, bool [B, T, N] or ids [B, T, k].
        """
        self._check_ids(ids)
        recorder = _Recorder(taps, wanted)
        streams = self.expand_streams(self.embed(ids))
        pre = self.first_pre(streams)
        sources = Sources()
        features = []
        for layer in range(self.config.num_hidden_layers):
            override = (select_override or {}).get(layer)
            arguments = (layer, streams, pre, sources, ids, override, recorder)
            if self.checkpoint_layers and torch.is_grad_enabled():
                result = checkpoint(self._layer, *arguments, use_reentrant=False)
            else:
                result = self._layer(*arguments)
            streams, pre, sources, feature, layer_taps = result
            features += [feature] if feature is not None else []
            recorder.keep(layer_taps)
        hidden = ops.collapse_streams(streams, pre)
        y = ops.rms_norm(hidden, self.weights["norm.weight"], self.config.rms_norm_eps)
        recorder.keep({"final_hidden": y})
        if features:
            recorder.keep({"dspark.features": torch.cat(features, dim=-1)})
        return self.head(y)

    def forward_layer(
        self,
        layer: int,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        sources: Sources,
        ids: torch.Tensor | None = None,
        taps: dict | None = None,
        wanted: Collection[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sources]:
        """One layer alone, on given inputs; returns streams, pre_mix and the sources that the next layer sees.

        ids [B, T] are needed only where the layer has an Engram.
        """
        recorder = _Recorder(taps, wanted)
        streams, pre, sources, _, layer_taps = self._layer(layer, streams, pre_mix, sources, ids, None, recorder)
        recorder.keep(layer_taps)
        return streams, pre, sources

    def _check_ids(self, ids: torch.Tensor) -> None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise BadCall(f"ids must be an integer tensor [B, T], got {ids.dtype} {list(ids.shape)}")
        image = self.config.image_token_id
        if image is not None and bool((ids == image).any()):
            raise BadCall(f"ids contain the image token {image}; the reference network reads text only")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., H] in the stream dtype; an id outside the vocabulary gives zeros."""
        known = (ids >= 0) & (ids < self.config.vocab_size)
        rows = embedding(ids.masked_fill(~known, 0), self.weights["embed.weight"])
        return rows.masked_fill(~known[..., None], 0).to(self.numerics.dtype)

    def expand_streams(self, x: torch.Tensor) -> torch.Tensor:
        """Every residual stream starts as a copy: [..., H] to [..., m, H]."""
        return x[..., None, :].expand(*x.shape[:-1], self.config.hc_mult, x.shape[-1])

    def first_pre(self, streams: torch.Tensor) -> torch.Tensor:
        """The first site reads stream 0 alone: float32 one-hot [..., m]."""
        pre = torch.zeros(streams.shape[:-1], dtype=torch.float32, device=streams.device)
        pre[..., 0] = 1
        return pre

    def head(self, y: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., V]: products of values in the stream dtype, accumulated in float32."""
        return linear(y.float(), self.weights["head.weight"].to(y.dtype).float())

    # ---- linears

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x W^T in the stream dtype, without input rounding (weights that are stored in BF16)."""
        return linear(x, self.weights[f"{name}.weight"].to(x.dtype))

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """What a quantised linear reads (2.13): e4m3 with one ue8m0 scale per 32 columns, or x itself."""
        return fake_quantise_ste(x, "fp8_32") if self.numerics.act_quant == "fp8_32" else x

    def round_rows(self, x: torch.Tensor, fmt: str) -> torch.Tensor:
        """What a cache gives back for the rows x."""
        return fake_quantise_ste(x, fmt) if self.numerics.kv == "canonical" else x

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    # ---- 2.2 one layer: attention site, then MoE site

    def _layer(self, layer, streams, pre, sources, ids, override, recorder):
        config, taps = self.config, {}
        prefix = f"layers.{layer}"
        if layer in config.engram_layer_ids:
            streams = self._engram(layer, streams, ids, taps)
        feature = None
        if layer in config.dspark_target_layer_ids:
            feature = streams.float().mean(-2).to(streams.dtype)

        def attention(x):
            nonlocal sources
            out, sources = self._attention(layer, x, sources, override, taps, recorder)
            return out

        def moe(x):
            return self.moe(f"{prefix}.ffn", x, config.num_experts_per_tok, taps, f"router.{layer}")

        streams, pre = self.block(prefix, streams, pre, attention, moe)
        taps[f"streams.{layer}"], taps[f"pre_mix.{layer}"] = streams, pre
        return streams, pre, sources, feature, {k: v for k, v in taps.items() if recorder.wants(k)}

    def block(self, prefix: str, streams, pre, attention, moe) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sites of a backbone layer or draft block; `attention` and `moe` map [..., H] to [..., H]."""
        streams, pre = self._site(f"{prefix}.hc_attn", f"{prefix}.attn_norm", streams, pre, attention)
        return self._site(f"{prefix}.hc_ffn", f"{prefix}.ffn_norm", streams, pre, moe)

    def _site(self, hc: str, norm: str, streams, pre_previous, function):
        """Single-pass mHC: the input is collapsed with the `pre` of the previous site."""
        w = self.weights
        pre, post, mix = ops.mhc_coefficients(
            streams, w[f"{hc}_fn"], w[f"{hc}_base"], w[f"{hc}_scale"], self.config
        )
        y = function(self.norm(norm, ops.collapse_streams(streams, pre_previous)))
        return ops.update_streams(streams, y, post, mix), pre

    # ---- 2.4 attention

    def project_query(self, prefix: str, x_rounded, positions, frequencies):
        """The query latent [..., q_lora] and the rotated queries [..., h, D]; q has no norm per head."""
        latent = self.norm(f"{prefix}.q_norm", self.linear(f"{prefix}.wq_a", x_rounded))
        q = self.linear(f"{prefix}.wq_b", self.round_input(latent))
        q = q.unflatten(-1, (self.config.num_attention_heads, self.config.head_dim))
        return latent, ops.rope(q, positions[..., None], frequencies)

    def project_kv(self, prefix: str, x_rounded, positions, frequencies):
        """Window rows [..., D] as the cache gives them back: K and V at once, rotated columns rounded too."""
        kv = self.norm(f"{prefix}.kv_norm", self.linear(f"{prefix}.wkv", x_rounded))
        return self.round_rows(ops.rope(kv, positions, frequencies), "fp8_32")

    def project_output(self, prefix: str, o, positions, frequencies):
        """Inverse rotation, then the grouped low-rank output projection: [..., h, D] to [..., H]."""
        config = self.config
        o = ops.rope(o, positions[..., None], frequencies, inverse=True)
        o = self.round_input(o.flatten(-2)).unflatten(-1, (config.o_groups, -1))
        wo_a = self.weights[f"{prefix}.wo_a.weight"].to(o.dtype).unflatten(0, (config.o_groups, config.o_lora_rank))
        u = torch.einsum("...gi,goi->...go", o, wo_a).flatten(-2)
        return self.linear(f"{prefix}.wo_b", self.round_input(u))

    def _attention(self, layer, x, sources, override, taps, recorder):
        config, prefix, ratio = self.config, f"layers.{layer}.attn", self.config.ratio(layer)
        positions = torch.arange(x.shape[1], device=x.device)
        frequencies = ops.rope_frequencies(config, ratio > 0, x.device)
        x_rounded = self.round_input(x)
        latent, q = self.project_query(prefix, x_rounded, positions, frequencies)
        kv = self.project_kv(prefix, x_rounded, positions, frequencies)
        sink = self.weights[f"{prefix}.attn_sink"]
        if ratio == 0:
            o, _ = ops.attend(q, kv, sink, config.sliding_window)
            return self.project_output(prefix, o, positions, frequencies), sources

        if layer in config.kv_source_layer_ids:
            sources = self._write_compressed(layer, x, sources, frequencies, taps)
        if layer in config.index_source_layer_ids:
            sources = self._select(layer, x, latent, sources, override, positions, frequencies, taps, recorder)
        want_mass = recorder.wants(f"compressed_attention.{layer}")
        o, mass = ops.attend(
            q, kv, sink, config.sliding_window, sources.compressed, sources.select, ratio, want_mass
        )
        if want_mass:
            taps[f"compressed_attention.{layer}"] = mass
        return self.project_output(prefix, o, positions, frequencies), sources

    # ---- 2.5 compressor, and the index keys of 2.6

    def _write_compressed(self, layer, x, sources, frequencies, taps) -> Sources:
        config, prefix, ratio = self.config, f"layers.{layer}.attn", self.config.ratio(layer)
        if ratio == 1:
            pooled = self.linear(f"{prefix}.compressor.wkv", x)
        else:
            pooled = self._pool(f"{prefix}.compressor", x, ratio)
        z = self.norm(f"{prefix}.compressor.norm", pooled)
        positions = torch.arange(z.shape[1], device=x.device) * ratio
        row_format = "fp4_16" if config.use_fp4_sparse_kv else "fp8_32"
        rows = self.round_rows(ops.rope(z, positions, frequencies), row_format)
        taps[f"compressed_kv.{layer}"] = rows
        keys = sources.index_keys
        if layer in config.index_k_source_layer_ids:
            # The indexer learns from its own loss alone (top-k passes no gradient), so it does not pull at the trunk.
            keys = self.norm(f"{prefix}.indexer.k_norm", self.linear(f"{prefix}.indexer.wk", z.detach()))
            keys = self.round_rows(ops.rope(keys, positions, frequencies), "mxfp4_32")
            taps[f"index_keys.{layer}"] = keys
        return dataclasses.replace(sources, compressed=rows, index_keys=keys)

    def _pool(self, prefix, x, ratio):
        """c_j = sum_i v_i * softmax_i(g_i) over the tokens i of group j, per channel, in float32.

        A last group that is not complete gives no row.
        """
        whole = x[:, : x.shape[1] // ratio * ratio].float()
        wkv, wgate = (self.weights[f"{prefix}.{n}.weight"].to(x.dtype).float() for n in ("wkv", "wgate"))
        v = linear(whole, wkv).unflatten(1, (-1, ratio))
        g = linear(whole, wgate).unflatten(1, (-1, ratio))
        return (v * g.softmax(2)).sum(2).to(x.dtype)

    # ---- 2.6 selection, 2.7 candidate pool

    def _select(self, layer, x, latent, sources, override, positions, frequencies, taps, recorder) -> Sources:
        config, keys = self.config, sources.index_keys
        rows = keys.shape[1]
        visible = ops.visible_rows(x.shape[1], rows, config.ratio(layer), x.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and recorder.wants(f"index_scores.{layer}")):
            scores = self.index_scores(layer, x.detach(), latent.detach(), keys, positions, frequencies)
        taps[f"index_scores.{layer}"] = scores
        ranked = scores.detach().masked_fill(~visible, -torch.inf)
        candidates = sources.candidates
        if layer == config.candidate_source_layer_id:
            candidates = ops.candidate_mask(ranked, visible, config.candidate_block_size, config.candidate_topk_blocks)
            taps[f"candidates.{layer}"] = candidates
        elif candidates is not None:
            ranked = ranked.masked_fill(~candidates, -torch.inf)
        if override is None:
            select = ops.top_mask(ranked, config.index_topk)
        else:
            select = override if override.dtype == torch.bool else ops.ids_to_mask(override, rows)
            select = select & visible
        if recorder.wants(f"select.{layer}"):
            taps[f"select.{layer}"] = ops.mask_to_ids(select, config.index_topk)
        return dataclasses.replace(sources, select=select, candidates=candidates)

    def index_scores(self, layer, x, latent, keys, positions, frequencies) -> torch.Tensor:
        """float32 [B, T, N], unmasked. No constant factor on the head weights: it would not change any choice."""
        prefix, config = f"layers.{layer}.attn.indexer", self.config
        iq = self.linear(f"{prefix}.wq_b", self.round_input(latent))
        iq = ops.rope(iq.unflatten(-1, (config.index_n_heads, -1)), positions[:, None], frequencies)
        head_weights = self.linear(f"{prefix}.weights_proj", x)
        return ops.index_scores(self.round_rows(iq, "mxfp4_32"), head_weights, keys)

    # ---- 2.9 MoE

    def moe(self, prefix: str, x, experts_per_token: int, taps: dict, tap: str) -> torch.Tensor:
        """Routed experts plus the shared one. Every expert sees every token, with weight 0 where it was not chosen."""
        config = self.config
        gates, ids, chosen = self._route(f"{prefix}.gate", x, experts_per_token)
        taps[f"{tap}.ids"], taps[f"{tap}.weights"] = ids.to(torch.int32), chosen
        x_rounded = self.round_input(x)
        experts = range(gates.shape[-1])
        w1, w3, w2 = (
            torch.stack([self.weights[f"{prefix}.experts.{e}.{w}.weight"].to(x.dtype) for e in experts])
            for w in ("w1", "w3", "w2")
        )
        mid = _swiglu(linear(x_rounded, w1.flatten(0, 1)), linear(x_rounded, w3.flatten(0, 1)), config.swiglu_limit)
        # The routing weight multiplies before the down projection and before its rounding.
        mid = (mid.unflatten(-1, (len(experts), -1)) * gates[..., None]).to(x.dtype)
        routed = linear(self.round_input(mid).flatten(-2), w2.transpose(0, 1).flatten(1))
        gate, up = (self.linear(f"{prefix}.shared_experts.{w}", x_rounded) for w in ("w1", "w3"))
        mid = _swiglu(gate, up, config.swiglu_limit).to(x.dtype)
        return routed + self.linear(f"{prefix}.shared_experts.w2", self.round_input(mid))

    def _route(self, prefix, x, experts_per_token):
        """Dense gates [..., E] (0 where not chosen), chosen ids and their scaled weights [..., k].

        Ties go to the lower id. u = sqrt(softplus(x gate^T)); the bias decides which experts, not how much of them.
        """
        weight = self.weights[f"{prefix}.weight"].to(x.dtype).float()
        u = softplus(linear(x.float(), weight)).sqrt()
        biased = u + self.weights[f"{prefix}.bias"]
        ids = biased.detach().sort(dim=-1, descending=True, stable=True).indices[..., :experts_per_token]
        chosen = u.gather(-1, ids)
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        return torch.zeros_like(u).scatter(-1, ids, chosen), ids, chosen

    # ---- 2.10 Engram

    def engram_rows(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """int64 [B, T, (n-1) * heads]: table rows of each token's n-grams, 2-grams first, offsets included."""
        config = self.config
        token_map = self.token_map.to(ids.device).long()
        compressed = token_map[ids.clamp(0, config.vocab_size - 1).long()]
        pad = token_map[config.engram_pad_token_id].expand(ids.shape[0], 1)
        primes, multipliers = self.engram_primes[layer], engram_multipliers(layer, config)
        hashed, rows, offset = compressed * multipliers[0], [], 0
        older = compressed
        for n in range(2, config.engram_max_ngram_size + 1):
            older = torch.cat((pad, older[:, :-1]), 1)
            hashed = hashed ^ (older * multipliers[n - 1])
            for head in range(config.engram_n_heads):
                prime = primes[(n - 2) * config.engram_n_heads + head]
                rows.append(hashed % prime + offset)
                offset += prime
        return torch.stack(rows, -1)

    def _engram(self, layer, streams, ids, taps):
        """S_j += sigmoid(signed sqrt of the normalised key-stream product) * v."""
        if ids is None:
            raise BadCall(f"layer {layer} has an Engram: pass the token ids")
        config, prefix, m = self.config, f"layers.{layer}.engram", self.config.hc_mult
        rows = self.engram_rows(layer, ids)
        taps[f"engram.{layer}.rows"] = rows
        e = embedding(rows, self.weights[f"{prefix}.embed.weight"]).flatten(-2).to(streams.dtype)
        keys_value = self.linear(f"{prefix}.wkv", e).float()
        k, v = keys_value.split((m * config.hidden_size, config.hidden_size), -1)
        k, s = k.unflatten(-1, (m, -1)), streams.float()
        weight = self.weights[f"{prefix}.q_weight"].float() * self.weights[f"{prefix}.k_weight"].float()

        def inverse_rms(y):
            return torch.rsqrt(y.square().mean(-1) + config.rms_norm_eps)

        dot = (s * weight * k).sum(-1) * inverse_rms(s) * inverse_rms(k) * config.hidden_size**-0.5
        gate = (dot.sign() * dot.abs().clamp_min(1e-6).sqrt()).sigmoid()
        return (s + gate[..., None] * v[..., None, :]).to(streams.dtype)

    # ---- 2.11 DSpark: see reference_draft

    def draft(self, features, ids, positions, gold=None) -> "reference_draft.Draft":
        """Draft blocks after the accepted positions [B, n] of the sequences; see `reference_draft.draft`."""
        return reference_draft.draft(self, features, ids, positions, gold)

    def markov_chain(self, base_logits, gold, tokens=None):
        """Adds the Markov term token by token; see `reference_draft.markov_chain`."""
        return reference_draft.markov_chain(self, base_logits, gold, tokens)

    def confidence_logits(self, raw_hidden, markov):
        """Acceptance logits of draft tokens; see `reference_draft.confidence_logits`."""
        return reference_draft.confidence_logits(self, raw_hidden, markov)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    return torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class _Recorder:
    """Which inner tensors to keep, and where."""

    def __init__(self, taps: dict | None, wanted: Collection[str] | None):
        self.taps, self.wanted = taps, wanted

    def wants(self, name: str) -> bool:
        kind = name.split(".")[0]
        return self.taps is not None and (kind in self.wanted if self.wanted is not None else kind not in TRAINING_TAPS)

    def keep(self, tensors: dict) -> None:
        if self.taps is not None:
            self.taps.update({k: v for k, v in tensors.items() if self.wants(k)})
