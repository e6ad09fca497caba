// Recording the sites of kernels, and finding the one that a mutant changes.
#include "twin/mutation.h"

#include <string.h>

#include "machine_private.h"
#include "twin/pipe.h"

namespace twin::mutation {

bool active = false;

namespace {

const char* const kKindNames[kKinds] = {"SetFlag", "WaitFlag", "PipeBarrier", "CrossCoreSetFlag", "CrossCoreWaitFlag", "SyncAll",
                                        "EnQue",   "DeQue",    "FreeTensor",  "InitBuffer",       "mask",              "LocalMemBar"};
const char* const kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "?"};

std::vector<Site> sites;
std::vector<Partners> pairs;
std::vector<Site> chosen;
Change chosen_change = kNothing;
bool recording = false;

struct RecentMask {
  uint64_t bits[4];
  Where where;
};
constexpr uint32_t kRecent = 8;
RecentMask recent[kRecent];
uint32_t next_recent = 0;

// The function that was launched, without template arguments: instantiations share their sites.
std::string kernel_name() {
  const char* name = running_launch == nullptr ? "" : running_launch->name;
  name += strspn(name, "( ");
  return std::string(name, strcspn(name, "<) "));
}

std::string detail_of(Kind kind, int32_t code) {
  switch (kind) {
    case kSetFlag:
    case kWaitFlag: return event_name(code);
    case kPipeBarrier:
    case kEnQue:
    case kDeQue:
    case kFreeTensor: return code == kAll ? "ALL" : kPipeNames[code];
    case kCrossSet: return "mode " + std::to_string(code);
    case kCrossWait: return code == kAll ? "ALL" : kPipeNames[code];
    default: return "";
  }
}

bool same(const Site& site, Kind kind, Where where, int32_t code) {
  return site.line == where.line && site.kind == kind && site.code == code && site.file == where.file;
}

void note(Kind kind, Where where, int32_t code, int32_t value) {
  const std::string kernel = kernel_name();
  for (Site& site : sites) {
    if (!same(site, kind, where, code) || site.kernel != kernel) continue;
    ++site.count;
    site.lowest = value < site.lowest ? value : site.lowest;
    site.highest = value > site.highest ? value : site.highest;
    return;
  }
  sites.push_back({kernel, where.file, detail_of(kind, code), kind, where.line, code, 1, value, value});
}

}  // namespace

Change change_at(Kind kind, Where where, int32_t code, int32_t value) {
  if (recording) note(kind, where, code, value);
  if (chosen_change == kNothing) return kNothing;
  for (const Site& site : chosen)
    if (same(site, kind, where, code) && site.kernel == kernel_name()) return chosen_change;
  return kNothing;
}

void note_partners(const Partners& found) {
  if (!recording) return;
  const auto same_place = [](Where a, Where b) { return a.line == b.line && strcmp(a.file, b.file) == 0; };
  for (const Partners& known : pairs)
    if (known.event == found.event && same_place(known.first, found.first) && same_place(known.second, found.second)) return;
  pairs.push_back(found);
}

void note_mask(const uint64_t* bits, Where where) {
  if (!recording) return;
  RecentMask& mask = recent[next_recent++ % kRecent];
  memcpy(mask.bits, bits, sizeof mask.bits);
  mask.where = where;
}
void note_mask_use(const uint64_t* bits, Where where) {
  if (!recording) return;
  for (uint32_t i = 1; i <= kRecent && i <= next_recent; ++i) {
    const RecentMask& mask = recent[(next_recent - i) % kRecent];
    if (memcmp(mask.bits, bits, sizeof mask.bits) == 0) return note_partners({mask.where, where, -1});
  }
}

void record() {
  sites.clear();
  pairs.clear();
  next_recent = 0;
  recording = active = true;
}
std::vector<Site> recorded() { return sites; }
std::vector<Partners> recorded_partners() { return pairs; }
void choose(const std::vector<Site>& some, Change change) {
  chosen = some;
  chosen_change = change;
  active = true;
}
void stop() {
  chosen_change = kNothing;
  recording = active = false;
}
std::string event_name(int32_t event) { return std::string(kPipeNames[event / 8]) + "_" + kPipeNames[event % 8]; }
const char* kind_name(Kind kind) { return kKindNames[kind]; }

}  // namespace twin::mutation
