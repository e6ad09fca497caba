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
std::vector<std::pair<Where, Where>> pairs;
Site chosen;
Change chosen_change = kNothing;
bool recording = false;

// The function that was launched, without template arguments: instantiations share their sites.
std::string kernel_name() {
  const char* name = running_launch == nullptr ? "" : running_launch->name;
  name += strspn(name, "( ");
  return std::string(name, strcspn(name, "<) "));
}

std::string detail_of(Kind kind, int32_t code) {
  switch (kind) {
    case kSetFlag:
    case kWaitFlag: return std::string(kPipeNames[code / 8]) + "_" + kPipeNames[code % 8];
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
  const bool here = chosen_change != kNothing && same(chosen, kind, where, code) && chosen.kernel == kernel_name();
  return here ? chosen_change : kNothing;
}

void note_partners(Where first, Where second) {
  if (!recording) return;
  const auto same_place = [](Where a, Where b) { return a.line == b.line && strcmp(a.file, b.file) == 0; };
  for (const auto& pair : pairs)
    if (same_place(pair.first, first) && same_place(pair.second, second)) return;
  pairs.emplace_back(first, second);
}

void record() {
  sites.clear();
  pairs.clear();
  recording = active = true;
}
std::vector<Site> recorded() { return sites; }
std::vector<std::pair<std::string, std::string>> recorded_partners() {
  const auto text = [](Where w) { return std::string(w.file) + ":" + std::to_string(w.line); };
  std::vector<std::pair<std::string, std::string>> found;
  for (const auto& pair : pairs) found.emplace_back(text(pair.first), text(pair.second));
  return found;
}
void choose(const Site& site, Change change) {
  chosen = site;
  chosen_change = change;
  active = true;
}
void stop() {
  chosen_change = kNothing;
  recording = active = false;
}
const char* kind_name(Kind kind) { return kKindNames[kind]; }

}  // namespace twin::mutation
