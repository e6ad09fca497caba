// What the cube and the vector cores of sparse_attention agree on: the key lists, cut into segments, and who keeps what where.
#pragma once

#include "di_softmax.h"

namespace {

constexpr int32_t kWidth = 512;  // the widest row

struct AttentionArgs {
  __gm__ uint8_t *q, *window, *compressed, *out;
  __gm__ int32_t *base, *origin, *modulo, *table, *rows, *requests, *positions, *count;
  __gm__ float* sink;
  int64_t q_row, q_head, out_row, out_head, window_stride, compressed_stride, table_stride, rows_stride;
  int32_t tokens, heads, width, k, window_format, compressed_format, block_rows, window_tokens;
  int32_t direct;  // the cube core fetches the query itself: of its own type, whole groups of heads
  float scale;
};

// Operands T, BF16 or float: how many heads meet a row's keys at once, and rings of pieces of 64 keys. Scores of a whole
// segment are there before its maximum is taken, so the sums are merged once a segment.
template <class T> struct Plan {
  static constexpr bool kBrief = sizeof(T) == 2;
  static constexpr int32_t kLine = 32 / sizeof(T);           // values of a chunk
  static constexpr int32_t kHeads = kBrief ? 64 : 32;        // of a core at once
  static constexpr int32_t kHalf = kHeads / 2;               // of a vector core
  static constexpr int32_t kSegment = kBrief ? 4 : 2;        // pieces
  static constexpr int32_t kSlots = kBrief ? 6 : 3;          // pieces of keys in L1
  static constexpr int32_t kAhead = kSlots - kSegment;       // pieces of the next segment that find room beside a whole one
  static constexpr int32_t kScores = kSegment + 1;            // pieces of scores in UB
  static constexpr int32_t kParts = kBrief ? 2 : 1;          // of a weight
  static constexpr int32_t kDepth = kBrief ? 256 : 128;      // columns that the cube takes at once
  static constexpr int32_t kStage = 16, kPitch = kStage + 1; // rows on their way to L1; the odd pitch spreads the banks
  static constexpr int32_t kWeightPitch = kHalf + 1;
  static constexpr int32_t kRaw = kStage * (kBrief ? 544 : 2048);  // bytes of rows as they are stored
  static constexpr int32_t kRaws = kBrief ? 4 : 2, kRawStep = kRaw + 256;  // a register's load may run past the last row

  // Bytes of one item, and the places in L1, L0C and UB.
  static constexpr int32_t kKeysBytes = kKeys * kWidth * sizeof(T);
  static constexpr int32_t kPartItems = 2 * kKeys * kHeads, kWeightsBytes = kParts * kPartItems * sizeof(T);
  static constexpr int32_t kL1Query = 0, kL1Keys = kHeads * kWidth * sizeof(T), kL1Weights = kL1Keys + kSlots * kKeysBytes;
  static_assert(kL1Weights + 2 * kWeightsBytes <= 512 * 1024, "L1");
  static constexpr int32_t kL0Half = 32 * 1024, kL0cScores = kHeads * kWidth * 4;
  static constexpr int32_t kScoreItems = kHalf * kKeys, kMoreItems = kHalf * kColumns;
  static constexpr int32_t kStageItems = kWidth * kPitch, kWeightItems = 2 * kKeys * kWeightPitch;
  static constexpr int32_t kUbScores = 0, kUbSums = kUbScores + kScores * kScoreItems * 4, kUbMore = kUbSums + kHalf * kWidth * 4;
  static constexpr int32_t kUbStage = kUbMore + 2 * kMoreItems * 4, kUbRaw = kUbStage + 2 * kStageItems * sizeof(T);
  static constexpr int32_t kUbWeights = kUbRaw + kRaws * kRawStep, kUbScales = kUbWeights + 2 * kParts * kWeightItems * sizeof(T);
  static constexpr int32_t kUbLines = kUbScales + kStage * kScaleLine * 2, kLines = 12;
  static_assert(kUbLines + kLines * 256 <= 248 * 1024, "UB");
};

// Flags between the cube core and its two vector cores (mode 2).
enum : uint16_t { kKeysReady, kKeysFree, kScoresReady, kScoresFree, kWeightsReady, kWeightsFree, kSumsReady, kSumsFree, kQueryReady, kQueryFree };

// A run of pieces of one row's key list, for one group of heads.
struct Segment {
  int32_t token, head, first_key, keys;  // keys: of this segment, those from first_key on
  int32_t window_first, window_keys;     // the list: positions from window_first on, then selected rows
  bool first, last;
  __aicore__ int32_t Pieces() const { return (keys + kKeys - 1) / kKeys; }
  __aicore__ int32_t Pairs() const { return (Pieces() + 1) / 2; }
  __aicore__ int32_t KeysOf(int32_t j) const { return Min32(kKeys, keys - j * kKeys); }
};

// The segments of a core, in order. Rows without a request or a position have none; nor have rows without keys.
template <class T> class Walk {
 public:
  __aicore__ void Init(const AttentionArgs& a, int32_t core, int32_t cores) {
    a_ = a, step_ = cores, item_ = core - cores;
    groups_ = (a.heads + Plan<T>::kHeads - 1) / Plan<T>::kHeads;
    items_ = (int64_t)ValidRows(a.count, a.tokens) * groups_;
  }
  // The next row and group of heads: false at the end.
  __aicore__ bool NextItem(Segment& s) {
    for (item_ += step_; item_ < items_; item_ += step_) {
      s.token = item_ / groups_, s.head = item_ % groups_ * Plan<T>::kHeads;
      const int32_t request = a_.requests[s.token], last = a_.positions[s.token];
      if (request < 0 || last < 0) continue;
      s.window_first = Max32(Max32(0, a_.origin[request]), last - a_.window_tokens + 1);
      s.window_keys = Max32(0, last - s.window_first + 1);
      int32_t selected = 0;
      __gm__ int32_t* rows = a_.rows + s.token * a_.rows_stride;
      while (selected < a_.k && rows[selected] >= 0) ++selected;
      left_ = s.window_keys + selected;
      pieces_ = (left_ + kKeys - 1) / kKeys, segments_ = (pieces_ + Plan<T>::kSegment - 1) / Plan<T>::kSegment;
      s.first_key = s.keys = 0;
      return true;
    }
    return false;
  }
  __aicore__ int32_t KeysLeft() const { return left_; }
  __aicore__ bool Next(Segment& s) {
    s = now_;
    s.first_key += s.keys, s.first = false;
    while (left_ == 0) {
      if (!NextItem(s)) return false;
      s.first = true;
    }
    const int32_t pieces = pieces_ / segments_;  // even segments, as far as they go
    s.keys = Min32(left_, pieces * kKeys);
    left_ -= s.keys, pieces_ -= pieces, --segments_;
    s.last = left_ == 0;
    now_ = s;
    return true;
  }

 private:
  AttentionArgs a_;
  Segment now_{};
  int64_t item_, items_;
  int32_t groups_, step_, left_ = 0, pieces_ = 0, segments_ = 0;
};

}  // namespace
