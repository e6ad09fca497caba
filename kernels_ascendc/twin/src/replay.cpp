// Discrete-event replay. The scalar unit of a core issues its rows in order; a pipe starts its next row when it is
// issued, the pipe is free and everything it waits for has ended. Starts are taken in order of time (ties by core and
// pipe), so that shared bandwidth is given out first come, first served, and the result does not depend on the order
// in which the twin ran the cores.
#include "replay.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <unordered_set>

#include "twin/machine.h"

namespace twin {
namespace {

constexpr size_t kNone = ~size_t(0);

struct Need {
  uint32_t pipe, rows;  // so many rows of that pipe must have ended
};

struct PipeState {
  std::vector<size_t> rows;  // in issue order
  std::vector<double> ends;  // of those done; never falls
  std::vector<std::pair<uint32_t, uint32_t>> waiters;  // rows needed, pipe that needs them
  std::vector<size_t> copies;                          // positions of copies that touch global memory
  double free = 0, covered = 0;  // when it can start another row; how long it had work under way
  uint32_t issued = 0;
  bool scheduled = false, waiting = false;
  size_t next_need = 0;  // of the next row, those already met
  double ready = 0;
  size_t cause = kNone;  // the row that decided `ready`
};

struct CoreState {
  size_t next = 0, last = 0;  // rows still to be issued
  double time = 0;
  size_t anchor = kNone;  // the last row that held the scalar unit
};

struct Event {
  double start;
  uint32_t pipe;
  bool operator>(const Event& o) const { return start != o.start ? start > o.start : pipe > o.pipe; }
};

class Launched {
 public:
  Launched(const TraceRow* rows, const TraceExtent* extents, const RowCost* costs, const SharedMemory& memory,
           size_t cores, std::unordered_set<uint64_t>& seen, Replayed& out)
      : rows_(rows), extents_(extents), costs_(costs), memory_(memory), seen_(seen), out_(out), pipes_(cores * kPipes),
        cores_(cores) {}

  void run(size_t first, size_t last) {
    first_ = first;
    needs_.assign(last - first, {});
    cause_.assign(last - first, kNone);
    held_.assign(last - first, 0.0);
    held_up_.assign(last - first, 0.0);
    own_end_.assign(last - first, 0.0);
    before_.assign(last - first, kNone);
    until_.assign(pipes_.size(), 0.0);
    place(first, last);
    find_needs(first, last);
    for (size_t core = 0; core < cores_.size(); ++core) issue(core);
    while (!events_.empty()) {
      const Event e = events_.top();
      events_.pop();
      execute(e.pipe, e.start);
    }
    finish();
  }

 private:
  const TraceRow& row(size_t i) const { return rows_[i]; }
  static uint32_t key(uint32_t core, uint32_t pipe) { return core * kPipes + pipe; }
  static bool executes(const TraceRow& r) { return r.op != op_Arrive; }

  void place(size_t first, size_t last) {
    for (CoreState& core : cores_) core.next = core.last = last;
    for (size_t i = first; i < last; ++i) {
      const TraceRow& r = row(i);
      if (!executes(r)) continue;
      CoreState& core = cores_[r.core];
      if (core.next == last) core.next = i;
      core.last = i + 1;
      PipeState& pipe = pipes_[key(r.core, r.pipe)];
      if (pipe.rows.empty()) pipe.rows.reserve(64);
      if (r.extents > 0 && r.pipe != kS) pipe.copies.push_back(pipe.rows.size());
      pipe.rows.push_back(i);
    }
  }

  Need need_of(uint32_t core, uint32_t pipe, uint32_t clock) const {
    const std::vector<size_t>& list = pipes_[key(core, pipe)].rows;
    const auto end = std::partition_point(list.begin(), list.end(), [&](size_t i) { return row(i).clock <= clock; });
    return {key(core, pipe), (uint32_t)(end - list.begin())};
  }

  // An arrival lies behind the instruction that made it, not behind the waits that follow under the same number.
  Need arrival_of(const TraceRow& r) const {
    const std::vector<size_t>& list = pipes_[key(r.core, r.pipe)].rows;
    const auto end = std::partition_point(list.begin(), list.end(), [&](size_t i) { return row(i).clock < r.clock; });
    const bool own = end != list.end() && row(*end).clock == r.clock;
    return {key(r.core, r.pipe), (uint32_t)(end - list.begin()) + own};
  }

  void find_needs(size_t first, size_t last) {
    std::vector<std::pair<uint64_t, Need>> arrivals;
    for (size_t i = first; i < last; ++i)
      if (row(i).op == op_Arrive) arrivals.push_back({row(i).work, arrival_of(row(i))});
    std::stable_sort(arrivals.begin(), arrivals.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<uint32_t> issued(pipes_.size(), 0);
    for (size_t i = first; i < last; ++i) {
      const TraceRow& r = row(i);
      if (!executes(r)) continue;
      std::vector<Need>& needs = needs_[i - first];
      if (r.op == op_Wait) {
        needs.push_back(need_of(r.source_core, r.source_pipe, r.source_clock));
      } else if (r.op == op_Await) {
        const auto begin = std::lower_bound(arrivals.begin(), arrivals.end(), r.work,
                                            [](const auto& a, uint64_t round) { return a.first < round; });
        for (auto a = begin; a != arrivals.end() && a->first == r.work; ++a) needs.push_back(a->second);
      } else if ((r.op == op_PipeBarrier || r.op == op_SyncAll) && r.work == kAll) {
        for (uint32_t p = 1; p < kPipes; ++p) needs.push_back({key(r.core, p), issued[key(r.core, p)]});
      }
      ++issued[key(r.core, r.pipe)];
    }
  }

  // Issues rows until one that holds the scalar unit.
  void issue(size_t number) {
    CoreState& core = cores_[number];
    while (core.next < core.last) {
      const size_t i = core.next;
      if (!executes(row(i))) {
        ++core.next;
        continue;
      }
      core.time += costs_[i].issue;
      held_[i - first_] = core.time;
      cause_[i - first_] = core.anchor;
      ++core.next;
      const uint32_t pipe = key(row(i).core, row(i).pipe);
      ++pipes_[pipe].issued;
      consider(pipe);
      if (row(i).pipe == kS) return;
    }
  }

  void raise(PipeState& pipe, double time, size_t cause) {
    if (time > pipe.ready) pipe.ready = time, pipe.cause = cause;
  }

  // Puts the next row of a pipe among the events once everything it waits for has ended.
  void consider(uint32_t number) {
    PipeState& pipe = pipes_[number];
    const size_t position = pipe.ends.size();
    if (pipe.scheduled || pipe.waiting || position >= pipe.issued) return;
    const size_t i = pipe.rows[position];
    const TraceRow& r = row(i);
    const std::vector<Need>& needs = needs_[i - first_];
    if (pipe.next_need == 0) {
      pipe.ready = held_[i - first_], pipe.cause = cause_[i - first_];
      if (position > 0) raise(pipe, pipe.free, pipe.rows[position - 1]);
      if (position > 0 && r.op == op_PipeBarrier) raise(pipe, pipe.ends.back(), pipe.rows[position - 1]);
      if (r.extents > 0 && r.pipe != kS) limit_copies(pipe, position);
    }
    for (; pipe.next_need < needs.size(); ++pipe.next_need) {
      const Need& need = needs[pipe.next_need];
      if (need.rows == 0) continue;
      PipeState& source = pipes_[need.pipe];
      if (source.ends.size() < need.rows) {
        source.waiters.push_back({need.rows, number});
        pipe.waiting = true;
        return;
      }
      raise(pipe, source.ends[need.rows - 1], source.rows[need.rows - 1]);
    }
    pipe.scheduled = true;
    events_.push({pipe.ready, number});
  }

  void limit_copies(PipeState& pipe, size_t position) {
    const auto here = std::lower_bound(pipe.copies.begin(), pipe.copies.end(), position);
    const size_t before = (size_t)(here - pipe.copies.begin());
    if (before < memory_.in_flight) return;
    const size_t blocker = pipe.copies[before - memory_.in_flight];
    raise(pipe, pipe.ends[blocker], pipe.rows[blocker]);
  }

  // When the shared memories have moved an instruction's bytes, and the latency that comes on top.
  double transfer(size_t i, double start, double& latency) {
    uint64_t lines = 0, fresh = 0;
    const TraceRow& r = row(i);
    bool writes = false;
    for (uint64_t e = r.first_extent; e < r.first_extent + r.extents; ++e) {
      const TraceExtent& extent = extents_[e];
      writes = writes || extent.use != kRead;
      const uint64_t tensor = (uint64_t)extent.tensor << 48;
      for (uint64_t l = extent.offset / memory_.line; l <= (extent.offset + extent.bytes - 1) / memory_.line; ++l) {
        ++lines;
        fresh += seen_.insert(tensor | l).second;
      }
    }
    if (r.pipe == kS && fresh == 0) return start;  // the scalar unit's data cache has it
    const double bytes = (double)lines * memory_.line, cold = (double)fresh * memory_.line;
    out_.l2_bytes += bytes;
    out_.hbm_bytes += cold;
    l2_free_ = std::max(l2_free_, start) + bytes / memory_.l2_bytes;
    double end = l2_free_;
    if (fresh > 0) {
      hbm_free_ = std::max(hbm_free_, start) + cold / memory_.hbm_bytes;
      end = std::max(end, hbm_free_);
    }
    latency += writes ? memory_.write_latency : fresh > 0 ? memory_.hbm_latency : memory_.l2_latency;
    return end;
  }

  void execute(uint32_t number, double start) {
    PipeState& pipe = pipes_[number];
    const size_t i = pipe.rows[pipe.ends.size()];
    const RowCost& cost = costs_[i];
    double latency = cost.latency, until = start + cost.busy;
    pipe.free = until;
    if (row(i).extents > 0) {
      const double moved = transfer(i, start, latency);
      held_up_[i - first_] = std::max(0.0, moved - until);
      until = std::max(until, moved);
    }
    double end = until + latency;
    own_end_[i - first_] = end;
    if (!pipe.ends.empty()) {
      end = std::max(end, pipe.ends.back());
      before_[i - first_] = pipe.rows[pipe.ends.size() - 1];
    }
    pipe.covered += std::max(0.0, until - std::max(start, until_[number]));
    until_[number] = std::max(until, until_[number]);
    out_.rows[i].start = start, out_.rows[i].end = end;
    cause_[i - first_] = pipe.cause;
    pipe.ends.push_back(end);
    pipe.scheduled = false;
    pipe.next_need = 0;
    wake(pipe);
    if (row(i).pipe == kS) {
      CoreState& core = cores_[row(i).core];
      core.time = end, core.anchor = i;
      issue(row(i).core);
    }
    consider(number);
  }

  void wake(PipeState& pipe) {
    std::vector<uint32_t> woken;
    size_t kept = 0;
    for (const auto& waiter : pipe.waiters) {
      if (waiter.first <= pipe.ends.size()) woken.push_back(waiter.second);
      else pipe.waiters[kept++] = waiter;
    }
    pipe.waiters.resize(kept);
    for (uint32_t number : woken) pipes_[number].waiting = false, consider(number);
  }

  void finish() {
    double total = 0;
    size_t last_row = kNone;
    for (const PipeState& pipe : pipes_) {
      if (pipe.ends.size() < pipe.rows.size()) throw std::runtime_error("the trace waits for what never ends");
      if (!pipe.ends.empty() && pipe.ends.back() > total) total = pipe.ends.back(), last_row = pipe.rows.back();
      out_.active.push_back(pipe.covered);
    }
    out_.launch_cycles.push_back(total);
    double scalar = 0, bandwidth = 0, time = total;
    for (size_t i = last_row; i != kNone; i = cause_[i - first_]) {
      while (own_end_[i - first_] < std::min(time, out_.rows[i].end) && before_[i - first_] != kNone)
        i = before_[i - first_];  // it ended when the row before did
      RowTimes& at = out_.rows[i];
      const double spent = std::max(0.0, time - at.start);
      const double queued = std::min(std::max(0.0, spent - costs_[i].busy), held_up_[i - first_]);
      bandwidth += queued;
      at.critical += spent - queued;
      time = std::min(time, at.start);
      const size_t before = cause_[i - first_];
      // Between a row that held the scalar unit and a row issued after it lies issuing.
      const double from = before == kNone ? 0.0 : out_.rows[before].end;
      const bool issued = before == kNone || (row(before).pipe == kS && row(before).core == row(i).core);
      if (issued && time > from) scalar += time - from, time = from;
    }
    out_.scalar_critical.push_back(scalar);
    out_.bandwidth_critical.push_back(bandwidth);
  }

  const TraceRow* rows_;
  const TraceExtent* extents_;
  const RowCost* costs_;
  const SharedMemory& memory_;
  std::unordered_set<uint64_t>& seen_;
  Replayed& out_;
  std::vector<PipeState> pipes_;
  std::vector<CoreState> cores_;
  std::vector<std::vector<Need>> needs_;
  std::vector<size_t> cause_, before_;  // what decided a row's start; the row before it on its pipe
  std::vector<double> held_, until_, held_up_, own_end_;  // own_end_: without waiting for the row before
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  double l2_free_ = 0, hbm_free_ = 0;
  size_t first_ = 0;
};

}  // namespace

Replayed replay(const TraceRow* rows, size_t count, const TraceExtent* extents, size_t extent_count,
                const RowCost* costs, const SharedMemory& memory) {
  if (!(memory.hbm_bytes > 0 && memory.l2_bytes > 0) || memory.line == 0 || memory.in_flight == 0)
    throw std::runtime_error("replay: bandwidths, line and in_flight must be positive");
  Replayed out;
  out.rows.assign(count, {});
  for (size_t i = 0; i < count; ++i) {
    out.cores = std::max(out.cores, (size_t)rows[i].core + 1);
    if (rows[i].first_extent + rows[i].extents > extent_count || rows[i].pipe >= kPipes)
      throw std::runtime_error("replay: a row names extents or a pipe that do not exist");
    if (i > 0 && (rows[i].launch < rows[i - 1].launch ||
                  (rows[i].launch == rows[i - 1].launch && rows[i].core < rows[i - 1].core)))
      throw std::runtime_error("replay: rows must be sorted by launch and core");
  }
  std::unordered_set<uint64_t> seen;
  for (size_t first = 0; first < count;) {
    size_t last = first;
    while (last < count && rows[last].launch == rows[first].launch) ++last;
    Launched(rows, extents, costs, memory, out.cores, seen, out).run(first, last);
    first = last;
  }
  return out;
}

}  // namespace twin
