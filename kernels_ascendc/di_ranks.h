// What kernels of several ranks share: windows, the counts that ranks tell each other, flags, and the verdict of a call.
//
// Layout of a window, equal on all ranks:
//   flags    [kFlagKinds][ranks] words of 32 bytes, each written by the rank whose column it is
//   headers  [2][ranks] of kHeaderBytes: 8 words (tag of the call, room, ...), then counts; two sets, for odd and even calls
//   rows     records of a fixed size for a call
// Why two calls in a row cannot meet in a window: a rank writes rows of a call only after it has the headers of all ranks,
// which they send when they have finished the call before; and a header of a call falls on the place of the one two calls ago,
// which everybody had read when the call before ended.
#pragma once

#include "di_rows.h"

namespace {

constexpr int32_t kFlagKinds = 2, kFlagBytes = 32, kHeaderBytes = 4096, kHeaderWords = 8, kMostCounts = 1016, kMostRanks = 64;
constexpr int32_t kCountsFlag = 0, kRowsFlag = 1;
constexpr int32_t kSharedBytes = 64 * 1024;  // of the workspace: what core 0 tells the others

enum RankStatus : int32_t { kFine = 0, kTimeout = 1, kMismatch = 2, kNoRoom = 3, kNoWindow = 4, kLostRow = 5, kBadSource = 6 };

struct RankArgs {
  __gm__ int64_t* windows;  // [ranks] addresses
  __gm__ int32_t* status;   // [8]: a RankStatus, and what belongs to it
  __gm__ uint8_t* shared;   // workspace
  int32_t rank, ranks, call, tag;
  int64_t deadline, window_bytes;
};

__aicore__ inline int64_t RowsAt(int32_t ranks) { return (int64_t)ranks * (kFlagKinds * kFlagBytes + 2 * kHeaderBytes); }

class Ranks {
 public:
  __aicore__ void Init(AscendC::TPipe& pipe, const RankArgs& a) {
    a_ = a;
    pipe.InitBuffer(header_, kHeaderBytes);
    pipe.InitBuffer(word_, kFlagBytes);
    pipe.InitBuffer(verdict_, 64 * kFlagBytes * 2);
  }
  __aicore__ bool First() const { return AscendC::GetBlockIdx() == 0; }
  __aicore__ AscendC::LocalTensor<int32_t> Header() { return header_.Get<int32_t>(); }
  __aicore__ AscendC::GlobalTensor<uint8_t> Window(int32_t rank, int64_t byte) const {
    return Global<uint8_t>((__gm__ uint8_t*)(a_.windows[rank] + byte));
  }
  __aicore__ AscendC::GlobalTensor<int32_t> Words(int32_t rank, int64_t byte) const {
    return Global<int32_t>((__gm__ uint8_t*)(a_.windows[rank] + byte));
  }

  // Core 0: the header, whose `counts` counts are filled in, to every rank, then the flags.
  __aicore__ void SendHeader(int32_t room, int32_t counts) {
    AscendC::LocalTensor<int32_t> header = Header();
    header.SetValue(0, a_.tag);
    header.SetValue(1, room);
    for (int32_t i = 2; i < kHeaderWords; ++i) header.SetValue(i, 0);
    Sync<AscendC::HardEvent::S_MTE3>();
    for (int32_t step = 0; step < a_.ranks; ++step) StoreRow(Words((a_.rank + step) % a_.ranks, HeaderAt(a_.rank)), header, kHeaderWords + counts);
    SetFlags(kCountsFlag);
  }
  // Core 0: the header of a rank into local memory.
  __aicore__ void LoadHeader(int32_t rank, int32_t counts) {
    Sync<AscendC::HardEvent::S_MTE2>();
    LoadRow(Header(), Words(a_.rank, HeaderAt(rank)), kHeaderWords + counts);
    Sync<AscendC::HardEvent::MTE2_S>();
  }

  // Core 0: tells every rank that all of this rank's stores so far are done.
  __aicore__ void SetFlags(int32_t kind) {
    AscendC::LocalTensor<int32_t> word = word_.Get<int32_t>();
    for (int32_t i = 0; i < 8; ++i) word.SetValue(i, i == 0 ? a_.call : 0);
    Sync<AscendC::HardEvent::S_MTE3>();
    AscendC::PipeBarrier<PIPE_MTE3>();
    for (int32_t step = 0; step < a_.ranks && a_.ranks > 1; ++step)
      AscendC::DataCopy(Words((a_.rank + step) % a_.ranks, FlagAt(kind, a_.rank)), word, 8);
    Sync<AscendC::HardEvent::MTE3_S>();
  }
  // Core 0: waits for all ranks' flags; a status of the ranks that did not set theirs before the deadline.
  __aicore__ bool Await(int32_t kind) {
    AscendC::LocalTensor<int32_t> word = word_.Get<int32_t>();
    const int64_t start = AscendC::GetSystemCycle();
    int32_t missing[2] = {0, 0};
    for (int32_t sender = 0; sender < a_.ranks && a_.ranks > 1; ++sender) {
      for (;;) {
        Sync<AscendC::HardEvent::S_MTE2>();
        AscendC::DataCopy(word, Words(a_.rank, FlagAt(kind, sender)), 8);
        Sync<AscendC::HardEvent::MTE2_S>();
        if (word.GetValue(0) == a_.call) break;
        if (AscendC::GetSystemCycle() - start > a_.deadline) {
          missing[sender / 32] |= (int32_t)(1u << (sender % 32));
          break;
        }
      }
    }
    if (missing[0] == 0 && missing[1] == 0) return true;
    Tell(kTimeout, missing[0], missing[1], kind, 0);
    return false;
  }

  // What a core has found, for `Verdict` of all cores, which comes next.
  __aicore__ void Tell(int32_t status, int32_t a, int32_t b, int32_t c, int32_t d) {
    AscendC::LocalTensor<int32_t> word = word_.Get<int32_t>();
    const int32_t values[8] = {status, a, b, c, d, 0, 0, 0};
    for (int32_t i = 0; i < 8; ++i) word.SetValue(i, values[i]);
    Sync<AscendC::HardEvent::S_MTE3>();
    AscendC::DataCopy(Global<int32_t>(a_.shared + AscendC::GetBlockIdx() * kFlagBytes), word, 8);
  }
  // All cores have called `Tell`, and meet here. Whether all was fine; else core 0 writes the first status that was not.
  __aicore__ bool Verdict() {
    AscendC::SyncAll();
    AscendC::LocalTensor<int32_t> verdict = verdict_.Get<int32_t>();
    const int32_t blocks = AscendC::GetBlockNum();
    AscendC::DataCopy(verdict, Global<int32_t>(a_.shared), blocks * 8);
    Sync<AscendC::HardEvent::MTE2_S>();
    int32_t block = 0;
    while (block < blocks && verdict.GetValue(block * 8) == kFine) ++block;
    const bool fine = block == blocks;
    if (!fine && First()) {
      Sync<AscendC::HardEvent::MTE2_MTE3>();
      AscendC::DataCopy(Global<int32_t>(a_.status), verdict[block * 8], 8);
    }
    AscendC::SyncAll();  // before the next `Tell` of anyone
    return fine;
  }

 private:
  __aicore__ int64_t FlagAt(int32_t kind, int32_t sender) const { return (int64_t)(kind * a_.ranks + sender) * kFlagBytes; }
  __aicore__ int64_t HeaderAt(int32_t sender) const {
    return (int64_t)a_.ranks * kFlagKinds * kFlagBytes + (int64_t)(a_.call % 2 * a_.ranks + sender) * kHeaderBytes;
  }

  RankArgs a_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> header_, word_, verdict_;
};

}  // namespace
