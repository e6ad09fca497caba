// moe_layer: the composite. The same sums and rounding points as its parts, without their trips through memory: rows
// are expanded once, routed and shared experts share their passes, and intermediates stay float32 rows in scratch
// memory.
#include "moe.h"

namespace di::DI_LEVEL {
namespace {

// Some rows of the working matrix times one weight.
struct Segment {
  const float* panels;
  int64_t first, last, width, depth;
};

constexpr int64_t kSegmentRows = 64;

struct Work {
  Segment* segments;
  int64_t count = 0, rows = 0, panels = 0;
  double cost_ns = 0;

  void add(const float* weight, int64_t first, int64_t last, int64_t width, int64_t depth) {
    for (; first < last; first += kSegmentRows) {
      const int64_t end = first + kSegmentRows < last ? first + kSegmentRows : last;
      segments[count++] = {weight, first, end, width, depth};
      rows = rows > end - first ? rows : end - first;
      panels = panels > panel_count(width) ? panels : panel_count(width);
      cost_ns += product_ns(end - first, width, depth);
    }
  }

  // a [rows][lda] to c [rows][ldc], float32.
  void run(const float* a, int64_t lda, float* c, int64_t ldc) const {
    const int64_t step = rows <= 2 ? 8 : 4, chunks = (panels + step - 1) / step;
    const Sink sink{reinterpret_cast<uint8_t*>(c), ldc * 4, DI_F32, nullptr, 0};
    parallel(count * chunks, cost_ns, [&](int64_t task) {
      const Segment& s = segments[task / chunks];
      const int64_t most = panel_count(s.width), first = task % chunks * step,
                    last = first + step < most ? first + step : most;
      if (first < last) Product{a, lda, s.panels, s.depth, s.width}.run(s.first, s.last, first, last, sink, 0);
    });
  }
};

struct Layer {
  const di_tensor &x, &codes, &scales, &gate, &bias, &gate_up, &down, &shared_gate_up, &shared_down, &out, &counts;
  int64_t k, rows, hidden, experts, routed, shared;  // widths I and J
  float scaling, limit;

  int64_t widest() const { return routed > shared ? routed : shared; }
  bool coded() const { return !absent(codes); }

  // Router: expert ids and weights of every token, and how often each expert was chosen.
  void route(Scratch& scratch, int32_t* ids, float* weights) const {
    int64_t lda;
    const float* a = expand_rows(x, {}, rows, hidden, scratch, &lda);
    const int64_t panels = panel_count(experts), ldc = panels * 16;
    float* logits = scratch.floats(rows * ldc);
    const Sink sink{reinterpret_cast<uint8_t*>(logits), ldc * 4, DI_F32, nullptr, 0};
    const Product product{a, lda, data_of<float>(gate), hidden, experts};
    parallel((rows + 7) / 8, product_ns(rows, ldc, hidden) + rows * experts * 30.0, [&](int64_t task) {
      Scratch own;
      float* score = own.floats(experts);
      const int64_t first = task * 8, last = first + 8 < rows ? first + 8 : rows;
      for (int64_t q = 0; q < panels; q += Product::kMostPanels)
        product.run(first, last, q, q + Product::kMostPanels < panels ? q + Product::kMostPanels : panels, sink, 0);
      for (int64_t r = first; r < last; ++r)
        route_row(logits + r * ldc, data_of<float>(bias), experts, k, scaling, score, ids + r * k, weights + r * k);
    });
    int32_t* chosen = data_of<int32_t>(counts);
    for (int64_t i = 0; i < rows * k; ++i) ++chosen[ids[i]];
  }

  // Rows of the experts' input: one for each choice, sorted by expert, then one for each token (the shared expert).
  float* gather(Scratch& scratch, const int32_t* source, int64_t routed_rows, int64_t* lda) const {
    int64_t from_stride;
    const float* from = coded() ? expand_rows(codes, scales, rows, hidden, scratch, &from_stride)
                                : expand_rows(x, {}, rows, hidden, scratch, &from_stride);
    *lda = (round_up(hidden, 16) / 16 | 1) * 16;
    float* a = scratch.floats((routed_rows + rows) * *lda);
    for (int64_t r = 0; r < routed_rows + rows; ++r)
      memcpy(a + r * *lda, from + (r < routed_rows ? source[r] / k : r - routed_rows) * from_stride, hidden * 4);
    return a;
  }

  // The experts' mid activations, as the float32 values of their codes where activations are quantised.
  void activate(const float* mid, int64_t mid_stride, const int32_t* source, const float* weights, int64_t routed_rows,
                float* a, int64_t lda) const {
    const int64_t total = routed_rows + rows;
    parallel((total + 7) / 8, total * widest() * 0.6, [&](int64_t task) {
      Scratch own;
      float *g = own.floats(2 * widest()), *y = own.floats(round_up(widest(), 16));
      uint8_t* code = static_cast<uint8_t*>(own.bytes(2 * widest()));
      for (int64_t r = task * 8; r < total && r < task * 8 + 8; ++r) {
        const int64_t width = r < routed_rows ? routed : shared;
        memcpy(g, mid + r * mid_stride, 2 * width * 4);
        round_row(out.dtype, 2 * width, g);
        swiglu_row(g, width, limit, r < routed_rows ? weights[source[r]] : 1.0f, y);
        if (coded()) {
          quantise_row(y, width, DI_FP8_32, code, code + width);
          dequantise_row(code, code + width, width, DI_FP8_32, a + r * lda);
        } else {
          round_row(out.dtype, width, y);
          memcpy(a + r * lda, y, width * 4);
        }
      }
    });
  }

  // out[t] = sum over its choices in order, then the shared expert's row; every row rounded to the stream first.
  void combine(float* made, int64_t stride, const int32_t* inverse, int64_t routed_rows) const {
    parallel((rows + 7) / 8, rows * hidden * (k + 2) * 0.15, [&](int64_t task) {
      Scratch own;
      float* total = own.floats(round_up(hidden, 16));
      for (int64_t r = task * 8; r < rows && r < task * 8 + 8; ++r) {
        memset(total, 0, round_up(hidden, 16) * 4);
        for (int64_t j = 0; j <= k; ++j) {
          float* row = made + (j < k ? inverse[r * k + j] : routed_rows + r) * stride;
          round_row(out.dtype, hidden, row);
          for (int64_t i = 0; i < hidden; i += 16) store(total + i, load(total + i) + load(row + i));
        }
        write_row(row_at(out, r), out.dtype, hidden, total);
      }
    });
  }

  void run() const {
    memset(counts.data, 0, experts * 4);
    if (rows == 0) return;
    Scratch scratch;
    int32_t *ids = scratch.ints(rows * k), *source = scratch.ints(rows * k), *inverse = scratch.ints(rows * k),
            *offsets = scratch.ints(experts + 1);
    float* weights = scratch.floats(rows * k);
    route(scratch, ids, weights);
    const int64_t routed_rows = sort_choices(ids, rows * k, experts, offsets, source, inverse),
                  total = routed_rows + rows;
    int64_t lda;
    const float* a = gather(scratch, source, routed_rows, &lda);
    const int64_t most = experts + 2 * (total / kSegmentRows) + 4;
    Segment* segments = static_cast<Segment*>(scratch.bytes(most * sizeof(Segment)));

    const int64_t mid_stride = (round_up(2 * widest(), 16) / 16 | 1) * 16,
                  act_stride = (round_up(widest(), 16) / 16 | 1) * 16;
    float *mid = scratch.floats(total * mid_stride), *act = scratch.floats(total * act_stride),
          *made = scratch.floats(total * lda);
    Work up{segments}, back{segments};
    add_experts(up, gate_up, 2 * routed, hidden, offsets);
    up.add(data_of<float>(shared_gate_up), routed_rows, total, 2 * shared, hidden);
    up.run(a, lda, mid, mid_stride);
    activate(mid, mid_stride, source, weights, routed_rows, act, act_stride);
    add_experts(back, down, hidden, routed, offsets);
    back.add(data_of<float>(shared_down), routed_rows, total, hidden, shared);
    back.run(act, act_stride, made, lda);
    combine(made, lda, inverse, routed_rows);
  }

  void add_experts(Work& work, const di_tensor& w, int64_t width, int64_t depth, const int32_t* offsets) const {
    for (int64_t i = 0; i < experts; ++i)
      work.add(data_of<float>(w) + i * panel_count(width) * depth * 16, offsets[i], offsets[i + 1], width, depth);
  }
};

}  // namespace

// x S*~[T, H], x_codes?, x_scales?, gate W[E, H], bias f32[E], gate_up W[E, 2I, H], down W[E, H, I], shared_gate_up
// W[2J, H], shared_down W[H, J], k, scaling, limit, count?, out S*[T, H], counts i32[E]
int moe_layer(DI_ARGS) {
  DI_NEED_CALL(17, 1, 2);
  const di_tensor &x = t[0], &codes = t[1], &scales = t[2], &gate = t[3], &bias = t[5], &gate_up = t[6], &down = t[8];
  const di_tensor &shared_gate_up = t[10], &shared_down = t[12], &count = t[14], &out = t[15], &counts = t[16];
  DI_NEED(is_panels(gate, 2) && is_panels(gate_up, 3) && is_panels(down, 3) && is_panels(shared_gate_up, 2) &&
              is_panels(shared_down, 2),
          "moe_layer: a weight was not prepared by this backend");
  const int64_t hidden = gate.shape[1], experts = gate.shape[0], routed = down.shape[2], shared = shared_down.shape[1],
                all = x.shape[0], k = p->i[0];
  DI_NEED(x.ndim == 2 && is_stream(x) && is_matrix(x, all, hidden) && hidden % 16 == 0,
          "moe_layer: x must be [T, %ld] bf16 or f32", (long)hidden);
  DI_NEED(absent(codes) ? absent(scales)
                        : codes.dtype == DI_U8 && is_activation(codes, scales, all, hidden) && routed % 32 == 0 &&
                              shared % 32 == 0,
          "moe_layer: x_codes must be fp8_32 codes [T, H] with scales");
  DI_NEED(gate_up.shape[0] == experts && gate_up.shape[1] == 2 * routed && gate_up.shape[2] == hidden &&
              down.shape[0] == experts && down.shape[1] == hidden && shared_gate_up.shape[0] == 2 * shared &&
              shared_gate_up.shape[1] == hidden && shared_down.shape[0] == hidden,
          "moe_layer: the weights' shapes do not fit each other");
  DI_NEED(is_vector(bias, DI_F32, experts) && is_vector(counts, DI_I32, experts) && is_count(count),
          "moe_layer: bias and counts must be [E]");
  DI_NEED(k >= 1 && k <= experts && k <= kMostChosen, "moe_layer: k must be 1 to %ld, got %ld", (long)experts, (long)k);
  DI_NEED(is_stream(out) && is_matrix(out, all, hidden), "moe_layer: out must be [T, %ld]", (long)hidden);
  const Layer layer{x,
                    codes,
                    scales,
                    gate,
                    bias,
                    gate_up,
                    down,
                    shared_gate_up,
                    shared_down,
                    out,
                    counts,
                    k,
                    valid_rows(count, all),
                    hidden,
                    experts,
                    routed,
                    shared,
                    (float)p->d[0],
                    (float)p->d[1]};
  layer.run();
  return DI_OK;
}

}  // namespace di::DI_LEVEL
