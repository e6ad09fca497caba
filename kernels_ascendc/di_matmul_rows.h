// Rows before and behind a product, on the vector cores: activations brought to the type or the line length that the
// cube takes, where they do not have it yet; float32 results quantised to fp8_32.
#pragma once

#include "di_codec.h"

namespace {

// Rows from `first` up to the call's last: `count` on the device, or *last, or `rows`.
struct RowRange {
  __gm__ int32_t *count, *last;
  int32_t first, rows;
};
__aicore__ inline int32_t LastRow(const RowRange& r) { return ValidRows(r.last != nullptr ? r.last : r.count, r.rows); }

// The pieces of rows of `width` items that a vector core works on, every core in turn.
class Piece {
 public:
  int32_t row, first, items;
  __aicore__ Piece(const RowRange& range, int32_t width, int32_t most)
      : width_(width), most_(most), across_((width + most - 1) / most), begin_(range.first), end_(LastRow(range)), next_(AscendC::GetBlockIdx()) {
    Set();
  }
  __aicore__ bool More() const { return row < end_; }
  __aicore__ void Next() {
    next_ += AscendC::GetBlockNum();
    Set();
  }
  // Of the piece, in rows that begin with the range's first.
  __aicore__ int64_t Offset() const { return (int64_t)(row - begin_) * width_ + first; }

 private:
  __aicore__ void Set() {
    row = begin_ + (int32_t)(next_ / across_), first = (int32_t)(next_ % across_) * most_, items = Min32(most_, width_ - first);
  }
  int32_t width_, most_, across_, begin_, end_;
  int64_t next_;
};
constexpr int32_t kPieceItems = 2048;

enum RowKind { kRowsBf16, kRowsF32, kRowsFp8 };

struct Widen32 {
  __gm__ uint8_t *values, *scales, *out;  // out: of row `first`
  int64_t values_stride, scales_stride;   // bytes
  RowRange range;
  int32_t width, kind;
};

// Rows of any kind to T.
template <class T> __global__ __vector__ void widen_kernel(Widen32 a) {
  using namespace AscendC;
  TPipe pipe;
  DenseRows<T, T> dense;
  DenseRows<bfloat16_t, T> brief;
  RowDecoder decoder;
  TBuf<TPosition::VECCALC> buffer;
  const int32_t most = Min32(a.width, kPieceItems);
  if (a.kind == kRowsBf16) brief.Init(pipe, most);
  dense.Init(pipe, most);
  if (a.kind == kRowsFp8) decoder.Init(pipe, DI_FP8_32, AlignUp(most, 32));
  pipe.InitBuffer(buffer, AlignUp(most, 64) * 4);
  LocalTensor<float> row = buffer.Get<float>();
  for (Piece p(a.range, a.width, most); p.More(); p.Next()) {
    __gm__ uint8_t* from = a.values + p.row * a.values_stride;
    if (a.kind == kRowsBf16) brief.Load(row, Global<bfloat16_t>(from + p.first * 2), p.items);
    else if (a.kind == kRowsF32) dense.Load(row, Global<T>(from + p.first * 4), p.items);
    else decoder.Load(row, p.items, from + p.first, a.scales + p.row * a.scales_stride + p.first / 32);
    dense.Store(Global<T>((__gm__ T*)a.out + p.Offset()), row, p.items);
  }
}

// e4m3 rows whose groups of k items are filled up to a multiple of 64 with zeros, their scales to an even number.
struct FillUp {
  __gm__ uint8_t *values, *scales, *out, *out_scales;
  int64_t values_stride, scales_stride;
  RowRange range;
  int32_t groups, k;
};
__global__ __vector__ void fill_up_kernel(FillUp a) {
  using namespace AscendC;
  constexpr int32_t kPiece = 8192;
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> codes, bytes;
  pipe.InitBuffer(codes, 2, kPiece + 64);
  pipe.InitBuffer(bytes, 2, kPiece / 32 + 64);
  const int32_t full = AlignUp(a.k, 64);
  for (int32_t r = a.range.first + GetBlockIdx(); r < LastRow(a.range); r += GetBlockNum()) {
    for (int32_t g = 0; g < a.groups; ++g) {
      const int64_t to = ((int64_t)(r - a.range.first) * a.groups + g) * full;
      for (int32_t first = 0; first < a.k; first += kPiece) {
        const int32_t items = Min32(kPiece, a.k - first), padded = AlignUp(items, 64), more = (padded - items) / 32;
        LocalTensor<uint8_t> raw = codes.AllocTensor<uint8_t>();
        DataCopyPad(raw, Global<uint8_t>(a.values + r * a.values_stride + (int64_t)g * a.k + first),
                    DataCopyExtParams(1, items, 0, 0, 0), DataCopyPadExtParams<uint8_t>(more > 0, 0, more * 32, 0));
        codes.EnQue(raw);
        raw = codes.DeQue<uint8_t>();
        StoreRow(Global<uint8_t>(a.out + to + first), raw, padded);
        codes.FreeTensor(raw);
        LocalTensor<uint8_t> scale = bytes.AllocTensor<uint8_t>();
        DataCopyPad(scale, Global<uint8_t>(a.scales + r * a.scales_stride + ((int64_t)g * a.k + first) / 32),
                    DataCopyExtParams(1, items / 32, 0, 0, 0), DataCopyPadExtParams<uint8_t>(more > 0, 0, more, 127));
        bytes.EnQue(scale);
        scale = bytes.DeQue<uint8_t>();
        StoreRow(Global<uint8_t>(a.out_scales + (to + first) / 32), scale, padded / 32);
        bytes.FreeTensor(scale);
      }
    }
  }
}

struct Coded {
  __gm__ uint8_t *dense, *codes, *scales;  // dense: of row `first`
  int64_t codes_stride, scales_stride;
  RowRange range;
  int32_t width;
};

__global__ __vector__ void encode_kernel(Coded a) {
  using namespace AscendC;
  TPipe pipe;
  DenseRows<float, float> dense;
  RowEncoder encoder;
  TBuf<TPosition::VECCALC> buffer;
  const int32_t most = Min32(a.width, kPieceItems);
  dense.Init(pipe, most);
  encoder.Init(pipe, DI_FP8_32, most);
  pipe.InitBuffer(buffer, AlignUp(most, 64) * 4);
  LocalTensor<float> row = buffer.Get<float>();
  for (Piece p(a.range, a.width, most); p.More(); p.Next()) {
    dense.Load(row, Global<float>((__gm__ float*)a.dense + p.Offset()), p.items);
    encoder.Store(row, p.items, a.codes + p.row * a.codes_stride + p.first, a.scales + p.row * a.scales_stride + p.first / 32);
  }
}

}  // namespace
