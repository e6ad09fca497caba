// Flags between cores: who takes part in a round, what a completed round carries, and SyncAll.
#include "twin/sync.h"

#include <algorithm>

#include "machine_private.h"
#include "trace.h"
#include "twin/mutation.h"

namespace twin {
namespace {

constexpr int kSyncId = 32;  // rounds of SyncAll, apart from the kernel's own ids

struct Party {
  std::vector<Core*> setters, receivers;
  int receiver_id;
};

std::vector<Core*> cores_of(bool cubes, bool vectors) {
  std::vector<Core*> all;
  for (Task& task : running_launch->tasks)
    if (task.core->rank == current->rank && (task.core->kind == kCube ? cubes : vectors)) all.push_back(task.core);
  return all;
}

bool takes_part(Core* core) {
  for (Task& task : running_launch->tasks)
    if (task.core == core) return true;
  return false;
}

void need_all_at_once(const char* name, Where where) {
  if (running_launch->all_at_once) return;
  give_up("%s at %s:%d waits for all blocks, but the launch has more blocks than cores", name, where.file, where.line);
}

Party party_of(Core& core, int mode, int id, Where where) {
  Group& group = *core.group;
  Core *cube = &group.core[0], *first = &group.core[1], *second = &group.core[2];
  const bool is_cube = core.kind == kCube;
  switch (mode) {
    case 0: {
      need_all_at_once("CrossCoreSetFlag", where);
      const std::vector<Core*> all = cores_of(is_cube, !is_cube);
      return {all, all, id};
    }
    case 1:
      if (is_cube || !takes_part(first) || !takes_part(second)) break;
      return {{first, second}, {first, second}, id};
    case 2: {
      if (!takes_part(cube) || !takes_part(first)) break;
      std::vector<Core*> vectors = {first};
      if (takes_part(second)) vectors.push_back(second);
      return is_cube ? Party{{cube}, vectors, id} : Party{vectors, {cube}, id};
    }
    case 4:
      if (!takes_part(cube)) break;
      if (is_cube) return {{cube}, {id >= 16 ? second : first}, id & 15};
      return {{&core}, {cube}, core.kind == kVector0 ? id : id + 16};
    default: break;
  }
  give_up("CrossCoreSetFlag at %s:%d: mode %d has no partners for %s in this launch", where.file, where.line, mode,
          place(core).c_str());
}

std::deque<Snapshot>& pending(Core& core, int id) {
  Launch& launch = *running_launch;
  const size_t index = (size_t)((core.group->index * 3 + core.kind) * (kSyncId + 1) + id);
  if (launch.rounds.size() <= index) launch.rounds.resize((size_t)(36 * 3 * (kSyncId + 1)));
  return launch.rounds[index];
}

// What everybody who arrived knows, as clocks of all groups.
const uint32_t* joined_foreign(const std::vector<Core*>& setters, int id, bool consume) {
  Launch& launch = *running_launch;
  uint32_t* all = launch.new_foreign();
  const uint32_t* seen = nullptr;
  for (Core* core : setters) {
    const Snapshot& s = pending(*core, id).front();
    if (s.foreign != nullptr && s.foreign != seen) {
      for (size_t i = 0; i < Launch::foreign_words(); ++i) all[i] = std::max(all[i], s.foreign[i]);
      seen = s.foreign;
    }
    uint32_t* own = all + (size_t)core->group->index * kTids;
    for (int i = 0; i < kTids; ++i) own[i] = std::max(own[i], s.known.at[i]);
    if (consume) pending(*core, id).pop_front();
  }
  return all;
}

// Makes the snapshot that the receivers get name this round, and records who arrived.
void trace_round(const std::vector<Core*>& setters, int id, Snapshot& joined, Where where) {
  const uint32_t round = (uint32_t)++running_launch->round_number;
  for (Core* core : setters) trace_arrival(*core, pending(*core, id).front(), round, where);
  joined.source = kRoundSource, joined.clock = round;
}

// Once all have arrived, every receiver's counter goes up by one.
void complete_rounds(const Party& party, int id, Where where) {
  const auto all_arrived = [&] {
    return std::all_of(party.setters.begin(), party.setters.end(), [&](Core* c) { return !pending(*c, id).empty(); });
  };
  while (all_arrived()) {
    std::vector<Snapshot> ready;
    const bool one_group = party.setters.size() <= 2;
    Snapshot joined = pending(*party.setters[0], id).front();
    if (tracing && party.setters.size() > 1) trace_round(party.setters, id, joined, where);
    if (one_group) {
      for (Core* core : party.setters) {
        const Snapshot& s = pending(*core, id).front();
        joined.known.join(s.known);
        joined.foreign = join_foreign(joined.foreign, s.foreign);
      }
      for (Core* core : party.setters) pending(*core, id).pop_front();
    } else {
      joined.foreign = joined_foreign(party.setters, id, true);
    }
    for (Core* receiver : party.receivers) {
      Snapshot s = joined;
      if (!one_group) memcpy(s.known.at, s.foreign + (size_t)receiver->group->index * kTids, sizeof s.known.at);
      CrossFlag& flag = receiver->cross[party.receiver_id];
      if (flag.ready.size() >= 15)
        give_up("CrossCoreSetFlag at %s:%d: the counter of id %d on %s passes 15", where.file, where.line,
                party.receiver_id, place(*receiver).c_str());
      flag.ready.push_back(s);
    }
  }
}

struct Waiting {
  CrossFlag* flag;
};
bool is_ready(void* context) { return !static_cast<Waiting*>(context)->flag->ready.empty(); }

}  // namespace

void cross_set(int mode, int pipe_id, uint16_t id, Where where) {
  const mutation::Change change = mutation::at(mutation::kCrossSet, where, mode, id);
  if (change == mutation::kDrop) return;
  id = (uint16_t)(id + mutation::shift(change));
  if (pipe_id == kAll || (pipe_id == kS && mode != 4))
    give_up("CrossCoreSetFlag at %s:%d: mode %d does not take PIPE_S or PIPE_ALL", where.file, where.line, mode);
  const int limit = mode == 4 ? (current->kind == kCube ? 27 : 11) : 16;
  if (id >= limit || (mode == 4 && id > 10 && id < 16))
    give_up("CrossCoreSetFlag at %s:%d: id %d does not exist in mode %d", where.file, where.line, id, mode);
  Pipe& pipe = begin((PipeId)pipe_id, op_CrossCoreSetFlag, where);
  const Party party = party_of(*current, mode, id, where);
  pending(*current, id).push_back(change == mutation::kForget ? Snapshot{} : release(pipe));
  pending(*current, id).back().where = where;
  done(pipe, op_CrossCoreSetFlag, where, (uint32_t)mode, id);
  complete_rounds(party, id, where);
}

void cross_wait(int, int pipe_id, uint16_t id, Where where) {
  const mutation::Change change = mutation::at(mutation::kCrossWait, where, pipe_id, id);
  if (change == mutation::kDrop) return;
  id = (uint16_t)(id + mutation::shift(change));
  if (pipe_id == kAll) give_up("CrossCoreWaitFlag at %s:%d does not take PIPE_ALL", where.file, where.line);
  if (id >= 32) give_up("CrossCoreWaitFlag at %s:%d: id %d does not exist", where.file, where.line, id);
  Pipe& pipe = begin((PipeId)pipe_id, op_CrossCoreWaitFlag, where);
  CrossFlag& flag = current->cross[id];
  Waiting waiting{&flag};
  char what[64];
  snprintf(what, sizeof what, "CrossCoreSetFlag of id %d", id);
  wait_until(is_ready, &waiting, what, where);
  const Snapshot from = flag.ready.front();
  flag.ready.erase(flag.ready.begin());
  mutation::partners(from.where, where);
  acquire(pipe, from, where);
}

namespace {
struct AllHere {
  Core* core;
  size_t wanted;
};
}  // namespace

// Every core waits until all have come; what went before on any pipe of any core then lies behind everything after.
void sync_all(bool vectors_only, int trigger, int wait, Where where) {
  if (mutation::at(mutation::kSyncAll, where) == mutation::kDrop) return;
  need_all_at_once("SyncAll", where);
  const bool has_cubes = !cores_of(true, false).empty();
  if (!vectors_only && !has_cubes)
    give_up("SyncAll<false> at %s:%d in a launch without cube cores never ends", where.file, where.line);
  if (vectors_only && current->kind == kCube)
    give_up("SyncAll<true> at %s:%d is for vector cores, and this is %s", where.file, where.line,
            place(*current).c_str());
  Pipe& pipe = begin(kS, op_SyncAll, where);
  Core& core = *current;
  Snapshot mine = release(core.pipe[trigger == kAll ? kS : trigger]);
  for (const Pipe& p : core.pipe) {
    if (trigger != kAll) break;
    mine.known.join(p.known);
    mine.known.at[p.tid] = p.now;
    mine.foreign = join_foreign(mine.foreign, p.foreign);
  }
  pending(core, kSyncId).push_back(mine);
  done(pipe, op_SyncAll, where, 0, (uint64_t)trigger);
  const std::vector<Core*> all = cores_of(!vectors_only, true);
  if (std::all_of(all.begin(), all.end(), [&](Core* c) { return !pending(*c, kSyncId).empty(); })) {
    Snapshot joined = mine;
    if (tracing) trace_round(all, kSyncId, joined, where);
    const uint32_t* foreign = joined_foreign(all, kSyncId, true);
    for (Core* c : all) {
      Snapshot s = joined;
      s.foreign = foreign;
      memcpy(s.known.at, foreign + (size_t)c->group->index * kTids, sizeof s.known.at);
      c->cross_sync.ready.push_back(s);
    }
  }
  Waiting waiting{&core.cross_sync};
  wait_until(is_ready, &waiting, "all cores at SyncAll", where);
  const Snapshot from = core.cross_sync.ready.front();
  core.cross_sync.ready.erase(core.cross_sync.ready.begin());
  if (wait == kAll || wait == kS) acquire_by_core(core, from, where);
  else acquire(core.pipe[wait], from, where);
}

}  // namespace twin
