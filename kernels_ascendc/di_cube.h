// A product y = x W^T on one cube core, tile by tile: global memory to L1 to L0A and L0B, Mmad or MmadMx into L0C, Fixpipe.
//
// Every stage is double-buffered or better, and loads are issued ahead: L1 holds kStages chunks of K, L0A and L0B two
// steps each, L0C two panels of columns. The order of the sum over K depends on the operands' type alone: steps of
// kStepBytes in a row's order, each one Mmad. So no bit depends on tiles, cores or what other rows there are.
#pragma once

#include "di_rows.h"

namespace {

constexpr int32_t kTileRows = 256, kTileColumns = 256;  // the largest tile
constexpr int32_t kPanelColumns = 128;                  // a panel of it: half of L0C
constexpr int32_t kStages = 3;                          // chunks in L1
constexpr int32_t kChunkBytes = 256, kStepBytes = 128;  // of K: the least chunk in L1, and what one Mmad takes
constexpr int32_t kScaleItems = 2048;                   // of K whose scales come in one copy, and the longest chunk

// L1, in bytes: the stages of x, those of the weights, and the scales of both.
constexpr uint32_t kStageBytes = 256 * kChunkBytes, kScaleBytes = 256 * kScaleItems / 32;
constexpr uint32_t kL1Weights = kStages * kStageBytes, kL1Scales = 2 * kL1Weights;
static_assert(kL1Scales + 2 * kStages * kScaleBytes <= 512 * 1024, "L1 has 512 KiB");
constexpr uint32_t kL0Bytes = 256 * kStepBytes, kL0cItems = kTileRows * kPanelColumns;

// Flags between the cube core and its vector cores.
constexpr uint16_t kFlagReady = 0, kFlagFree = 1;

enum class Weights {
  kRows,   // rows in global memory, of the type that the cube multiplies
  kTiles,  // DI_LAYOUT_CUBE_FP8 in global memory
  kVector  // put into L1 by the core's vector cores
};

struct Product {
  __gm__ uint8_t *x, *x_scales, *w, *w_scales, *out, *out_scales;
  __gm__ int32_t *count, *offsets;  // offsets: rows of x are those of group g; otherwise all rows meet every group
  int64_t x_stride, x_group, out_stride, out_group;  // items between rows, and between the groups' columns
  int64_t x_scale_stride, out_scale_stride;          // bytes between rows of scales
  int64_t w_stride;                                  // items between rows of weights
  int64_t w_group, w_scale_group;                    // bytes between groups
  int32_t groups, first_row, last_row, n, k;         // only rows from first_row up to last_row
  int32_t columns, chunk_bytes;                      // of a tile: its columns, and how much of K a stage of L1 holds
};

// The tiles of a core, and the chunks of K of each, in the order in which cube and vector cores walk through them.
class TileCursor {
 public:
  int32_t group = 0, row = 0, rows = 0, column = 0, columns = 0;  // the tile
  int32_t chunk = 0, chunks = 0, first = 0, items = 0;            // of K: item `first` on

  __aicore__ TileCursor(const Product& p, int32_t core, int32_t cores, int32_t item_bytes)
      : p_(p), left_(core), cores_(cores), chunk_items_(p.chunk_bytes / item_bytes) {
    chunks = (p.k + chunk_items_ - 1) / chunk_items_;
    across_ = (p.n + p.columns - 1) / p.columns;
    if (p.offsets != nullptr) start_ = p.offsets[0];
    Settle();
  }
  __aicore__ bool More() const { return group < p_.groups; }
  __aicore__ bool Last() const { return chunk + 1 == chunks; }
  __aicore__ void Next() {
    if (Last()) {
      left_ += cores_;
      Settle();
    } else {
      SetChunk(chunk + 1);
    }
  }

 private:
  __aicore__ void SetChunk(int32_t to) {
    chunk = to, first = to * chunk_items_, items = Min32(chunk_items_, p_.k - first);
  }
  // Finds the tile with number left_, counted from the current group's first.
  __aicore__ void Settle() {
    for (; group < p_.groups; ++group) {
      const int32_t stop = p_.offsets != nullptr ? p_.offsets[group + 1] : ValidRows(p_.count, p_.last_row);
      const int32_t begin = Max32(p_.first_row, start_), end = Min32(p_.last_row, stop);
      const int32_t tiles = end > begin ? (end - begin + kTileRows - 1) / kTileRows * across_ : 0;
      if (left_ < tiles) {
        row = begin + left_ / across_ * kTileRows, rows = Min32(kTileRows, end - row);
        column = left_ % across_ * p_.columns, columns = Min32(p_.columns, p_.n - column);
        SetChunk(0);
        return;
      }
      left_ -= tiles;
      if (p_.offsets != nullptr) start_ = stop;
    }
  }

  const Product& p_;
  int32_t left_, cores_, chunk_items_, across_ = 0;
  int32_t start_ = 0;  // the group's first row
};

template <class T, bool kMx> struct L0Item {
  using Type = T;
};
template <> struct L0Item<fp8_e4m3fn_t, true> {
  using Type = AscendC::mx_fp8_e4m3_t;
};

// Results go to global memory; di_encode.h has a sender for those that the vector cores take on.
struct NoSender {
  static constexpr bool kSends = false;
};

// T: operands, C: result; kMx: both are e4m3 with scales.
template <class T, class C, bool kMx, Weights kWeights, class Sender = NoSender> class CubeProduct {
 public:
  using L0 = typename L0Item<T, kMx>::Type;
  static constexpr int32_t kLine = 32 / sizeof(T), kStep = kStepBytes / sizeof(T);

  __aicore__ void Run(const Product& product, int32_t core, int32_t cores) {
    using namespace AscendC;
    p_ = product;
    TileCursor ahead(p_, core, cores, sizeof(T));
    TileCursor at(p_, core, cores, sizeof(T));
    for (int32_t i = 0; i < kStages; ++i) SetFlag<HardEvent::MTE1_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) SetFlag<HardEvent::M_MTE1>(i), SetFlag<HardEvent::FIX_M>(i);
    for (int32_t i = 0; i < kStages - 1 && ahead.More(); ++i, ahead.Next()) Load(ahead);
    for (; at.More(); at.Next()) {
      if (ahead.More()) Load(ahead), ahead.Next();
      Multiply(at);
    }
    for (int32_t i = 0; i < kStages; ++i) WaitFlag<HardEvent::MTE1_MTE2>(i);
    for (int32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::M_MTE1>(i), WaitFlag<HardEvent::FIX_M>(i);
    if constexpr (Sender::kSends) sender_.Finish();
    PipeBarrier<PIPE_ALL>();
  }

 private:
  template <class I> __aicore__ AscendC::LocalTensor<I> L1(AscendC::TPosition position, uint32_t at, uint32_t bytes) {
    return AscendC::LocalTensor<I>(position, at, bytes / sizeof(I));
  }
  __aicore__ AscendC::LocalTensor<T> X1(int32_t stage) { return L1<T>(AscendC::TPosition::A1, stage * kStageBytes, kStageBytes); }
  __aicore__ AscendC::LocalTensor<T> W1(int32_t stage) {
    return L1<T>(AscendC::TPosition::B1, kL1Weights + stage * kStageBytes, kStageBytes);
  }
  __aicore__ AscendC::LocalTensor<fp8_e8m0_t> Scales1(int32_t operand, int32_t stage) {
    return L1<fp8_e8m0_t>(AscendC::TPosition::A1, kL1Scales + (2 * stage + operand) * kScaleBytes, kScaleBytes);
  }

  // Global memory to L1: the next chunk of x and, if they are there, of the weights.
  __aicore__ void Load(const TileCursor& t) {
    using namespace AscendC;
    const int32_t stage = loaded_++ % kStages;
    WaitFlag<HardEvent::MTE1_MTE2>(stage);
    if constexpr (kMx)
      if (t.first % kScaleItems == 0) LoadScales(t);
    const GlobalTensor<T> x = Global<T>((__gm__ T*)p_.x + t.row * p_.x_stride + t.group * p_.x_group + t.first);
    DataCopy(X1(stage), x, Nd2NzParams(1, t.rows, t.items, 0, p_.x_stride, AlignUp(t.rows, 16), 1, 0));
    if constexpr (kWeights == Weights::kRows) {
      const GlobalTensor<T> w = Global<T>((__gm__ T*)(p_.w + t.group * p_.w_group) + t.column * p_.w_stride + t.first);
      DataCopy(W1(stage), w, Nd2NzParams(1, t.columns, t.items, 0, p_.w_stride, AlignUp(t.columns, 16), 1, 0));
    } else if constexpr (kWeights == Weights::kTiles) {
      const uint32_t columns = AlignUp(t.columns, 16), all = AlignUp(p_.n, 16);
      const GlobalTensor<T> w = Global<T>(p_.w + t.group * p_.w_group + ((int64_t)(t.first / kLine) * all + t.column) * 32);
      DataCopy(W1(stage), w, DataCopyParams(AlignUp(t.items, kLine) / kLine, columns, all - columns, 0));
    }
    SetFlag<HardEvent::MTE2_MTE1>(stage);
  }

  // Scales of kScaleItems items, in the form [rows / 16][k / 64][16][2]. The chunk's flags are theirs too: there are as many
  // buffers of scales as stages, and each serves one chunk or more, so the cube has left a buffer where it has left the stage.
  __aicore__ void LoadScales(const TileCursor& t) {
    using namespace AscendC;
    const int32_t stage = scales_loaded_++ % kStages, pairs = ScalePairs(t);
    const GlobalTensor<half> x =
        Global<half>(p_.x_scales + t.row * p_.x_scale_stride + (t.group * p_.x_group + t.first) / 32);
    DataCopy(Scales1(0, stage).template ReinterpretCast<half>(), x,
             Dn2NzParams(1, pairs, t.rows, 0, p_.x_scale_stride / 2, pairs, 1, 0));
    const int32_t all = p_.k / 64;
    const GlobalTensor<fp8_e8m0_t> w =
        Global<fp8_e8m0_t>(p_.w_scales + t.group * p_.w_scale_group + ((int64_t)t.column / 16 * all + t.first / 64) * 32);
    DataCopy(Scales1(1, stage), w, DataCopyParams(AlignUp(t.columns, 16) / 16, pairs, all - pairs, 0));
  }
  __aicore__ int32_t ScalePairs(const TileCursor& t) {
    return Min32(kScaleItems, p_.k - t.first / kScaleItems * kScaleItems) / 64;
  }

  // The chunk's products, and behind the last chunk the tile's result.
  __aicore__ void Multiply(const TileCursor& t) {
    using namespace AscendC;
    const int32_t stage = multiplied_++ % kStages;
    if constexpr (kMx)
      if (t.first % kScaleItems == 0) scales_ = scales_used_++ % kStages;
    WaitFlag<HardEvent::MTE2_MTE1>(stage);
    if constexpr (kWeights == Weights::kVector) CrossCoreWaitFlag<2, PIPE_MTE1>(kFlagReady);
    for (int32_t from = 0; from < t.items; from += kStep) Step(t, stage, from, Min32(kStep, t.items - from));
    if (t.Last()) Store(t);
  }

  __aicore__ void Step(const TileCursor& t, int32_t stage, int32_t from, int32_t k) {
    using namespace AscendC;
    const int32_t half = steps_++ % 2;
    const bool last_of_chunk = from + k == t.items;
    const LocalTensor<L0> a(TPosition::A2, half * kL0Bytes, kL0Bytes / sizeof(T));
    WaitFlag<HardEvent::M_MTE1>(half);
    ToL0(a, X1(stage), 0, 0, t.rows, t.rows, t, from, k);
    for (int32_t panel = 0; panel * kPanelColumns < t.columns; ++panel)
      ToL0(Right(half, panel), W1(stage), 1, panel * kPanelColumns, PanelColumns(t, panel), t.columns, t, from, k);
    if (last_of_chunk) {
      SetFlag<HardEvent::MTE1_MTE2>(stage);
      if constexpr (kWeights == Weights::kVector) CrossCoreSetFlag<2, PIPE_MTE1>(kFlagFree);
    }
    SetFlag<HardEvent::MTE1_M>(half);
    WaitFlag<HardEvent::MTE1_M>(half);
    for (int32_t panel = 0; panel * kPanelColumns < t.columns; ++panel) {
      MmadParams p;
      p.m = t.rows, p.n = PanelColumns(t, panel), p.k = k, p.disableGemv = true, p.cmatrixInitVal = t.first + from == 0;
      if (p.cmatrixInitVal) WaitFlag<HardEvent::FIX_M>((panels_ + panel) % 2);
      else if (p.m / 16 * (p.n / 16) < 10) PipeBarrier<PIPE_M>();
      if constexpr (kMx) MmadMx(Result(panel), a, Right(half, panel), p);
      else Mmad(Result(panel), a, Right(half, panel), p);
      if (last_of_chunk && t.Last()) SetFlag<HardEvent::M_FIX>((panels_ + panel) % 2);
    }
    SetFlag<HardEvent::M_MTE1>(half);
  }
  __aicore__ int32_t PanelColumns(const TileCursor& t, int32_t panel) {
    return Min32(kPanelColumns, t.columns - panel * kPanelColumns);
  }
  __aicore__ AscendC::LocalTensor<L0> Right(int32_t half, int32_t panel) {
    return AscendC::LocalTensor<L0>(AscendC::TPosition::B2, half * kL0Bytes + panel * kL0Bytes / 2, kL0Bytes / 2 / sizeof(T));
  }
  __aicore__ AscendC::LocalTensor<float> Result(int32_t panel) {
    return AscendC::LocalTensor<float>(AscendC::TPosition::CO1, (panels_ + panel) % 2 * kL0cItems * sizeof(float), kL0cItems);
  }

  // k items of `rows` lines from line `start` on, of a chunk that has `all` lines in L1.
  __aicore__ void ToL0(const AscendC::LocalTensor<L0>& to, const AscendC::LocalTensor<T>& chunk, int32_t operand, int32_t start,
                       int32_t rows, int32_t all, const TileCursor& t, int32_t from, int32_t k) {
    AscendC::LoadData2DParamsV2 p;
    p.mStartPosition = start / 16, p.kStartPosition = from / kLine;
    p.mStep = p.dstStride = AlignUp(rows, 16) / 16, p.kStep = (k + kLine - 1) / kLine;
    p.srcStride = AlignUp(all, 16) / 16;
    if constexpr (kMx) {
      AscendC::LoadData2DMxParams s;
      s.xStartPosition = start / 16, s.yStartPosition = (t.first % kScaleItems + from) / 64;
      s.xStep = p.mStep, s.yStep = s.dstStride = k / 64, s.srcStride = ScalePairs(t);
      AscendC::LoadData(to, chunk, Scales1(operand, scales_), p, s);
    } else {
      AscendC::LoadData(to, chunk, p);
    }
  }

  __aicore__ void Store(const TileCursor& t) {
    using namespace AscendC;
    for (int32_t panel = 0; panel * kPanelColumns < t.columns; ++panel) {
      WaitFlag<HardEvent::M_FIX>((panels_ + panel) % 2);
      if constexpr (Sender::kSends) sender_.Send(Result(panel), t.rows, PanelColumns(t, panel));
      else ToGlobal(t, panel);
      SetFlag<HardEvent::FIX_M>((panels_ + panel) % 2);
    }
    panels_ += (t.columns + kPanelColumns - 1) / kPanelColumns;
  }
  __aicore__ void ToGlobal(const TileCursor& t, int32_t panel) {
    using namespace AscendC;
    __gm__ C* out = (__gm__ C*)p_.out + t.row * p_.out_stride + t.group * p_.out_group + t.column + panel * kPanelColumns;
    FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> p;
    p.nSize = PanelColumns(t, panel), p.mSize = t.rows, p.srcStride = AlignUp(t.rows, 16), p.dstStride = p_.out_stride;
    if constexpr (sizeof(C) == 2) p.quantPre = QuantMode_t::F322BF16;
    Fixpipe<C, float, CFG_ROW_MAJOR>(Global<C>(out), Result(panel), p);
  }

  Product p_;
  Sender sender_;
  int32_t loaded_ = 0, multiplied_ = 0, steps_ = 0, panels_ = 0;
  int32_t scales_loaded_ = 0, scales_used_ = 0, scales_ = 0;
};

}  // namespace
