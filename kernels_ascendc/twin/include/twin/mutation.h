// Mutants: one synchronisation, buffer count or mask of a kernel left out or changed while it runs, to see whether the
// twin's checks notice. Off unless the module's `mutation` functions ask for it (tools/ascend/mutate.py).
#pragma once

#include <string>
#include <vector>

#include "twin/machine.h"

namespace twin::mutation {

enum Kind : uint8_t {
  kSetFlag,
  kWaitFlag,
  kPipeBarrier,
  kCrossSet,
  kCrossWait,
  kSyncAll,
  kEnQue,
  kDeQue,
  kFreeTensor,
  kInitBuffer,
  kMask,
  kLocalMemBar,
  kKinds
};
// kForget: the instruction takes place, but carries no order; kUp and kDown: its event id or buffer count is one off.
enum Change : uint8_t { kNothing, kDrop, kForget, kUp, kDown };

// A place in a kernel's source, `file:line`, with what it says (`detail`: the event, pipe or mode).
struct Site {
  std::string kernel, file, detail;
  Kind kind;
  int32_t line, code;
  uint64_t count;           // how often it was reached
  int32_t lowest, highest;  // event ids, buffer counts; of a mask: 1 if it was ever partial
};

extern bool active;  // sites are being recorded, or one of them is to change

Change change_at(Kind kind, Where where, int32_t code, int32_t value);
// What to do at a site, by default nothing special.
inline Change at(Kind kind, Where where, int32_t code = 0, int32_t value = 0) {
  return __builtin_expect(active, 0) ? change_at(kind, where, code, value) : kNothing;
}
inline int shift(Change change) { return change == kUp ? 1 : change == kDown ? -1 : 0; }

// What was released at `first` was acquired at `second`; `event` of flags inside a core, otherwise -1.
struct Partners {
  Where first, second;
  int32_t event;
};
void note_partners(const Partners& partners);
inline void partners(Where first, Where second, int32_t event = -1) {
  if (__builtin_expect(active, 0)) note_partners({first, second, event});
}

// A mask made at `where`, and a mask used there: the use is the partner of the last mask with the same bits.
void note_mask(const uint64_t* bits, Where where);
void note_mask_use(const uint64_t* bits, Where where);
inline void mask_use(const uint64_t* bits, Where where) {
  if (__builtin_expect(active, 0)) note_mask_use(bits, where);
}

void record();                                // forgets what was recorded, and records from here on
std::vector<Site> recorded();
std::vector<Partners> recorded_partners();
std::string event_name(int32_t event);                              // as MTE2_V
void choose(const std::vector<Site>& sites, Change change);  // from here on, every time one of them is reached
void stop();
const char* kind_name(Kind kind);

}  // namespace twin::mutation
