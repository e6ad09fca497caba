// Sums, maxima and minima over elements, repeats and blocks.
#include "twin/reduce.h"

#include "lanes.h"
#include "walk.h"

namespace twin {
namespace {

// A value with the place it came from.
struct Best {
  double value;
  int64_t index;
  bool any;
};

double item(const uint8_t* p, Type type, int64_t i) {
  switch (type) {
    case F32: {
      float x;
      memcpy(&x, p + i * 4, 4);
      return x;
    }
    case F16: {
      uint16_t h;
      memcpy(&h, p + i * 2, 2);
      return from_half(h);
    }
    case I32: {
      int32_t x;
      memcpy(&x, p + i * 4, 4);
      return x;
    }
    case U32: {
      uint32_t x;
      memcpy(&x, p + i * 4, 4);
      return x;
    }
    case I16: {
      int16_t x;
      memcpy(&x, p + i * 2, 2);
      return x;
    }
    default: {
      uint16_t x;
      memcpy(&x, p + i * 2, 2);
      return x;
    }
  }
}
void put_item(uint8_t* p, Type type, double x) {
  switch (type) {
    case F32: {
      const float f = (float)x;
      memcpy(p, &f, 4);
      return;
    }
    case F16: {
      const uint16_t h = to_half((float)x);
      memcpy(p, &h, 2);
      return;
    }
    case I32: {
      const int32_t v = (int32_t)(int64_t)x;
      memcpy(p, &v, 4);
      return;
    }
    case U32: {
      const uint32_t v = (uint32_t)(int64_t)x;
      memcpy(p, &v, 4);
      return;
    }
    default: {
      const uint16_t v = (uint16_t)(int64_t)x;
      memcpy(p, &v, 2);
      return;
    }
  }
}

void need_type(Op op, Type type, bool with_integers, Where where) {
  if (type == F32 || type == F16 || (with_integers && (type == I32 || type == U32 || type == I16 || type == U16)))
    return;
  give_up("%s at %s:%d: the device has no such instruction for %s", kOpNames[op], where.file, where.line,
          kTypeNames[type]);
}

// Neighbours are added first, then the sums of neighbours, and so on; each sum is rounded to the type.
void tree(float* x, int n, bool half_steps) {
  for (; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) {
      const float s = x[2 * i] + x[2 * i + 1];
      x[i] = half_steps ? from_half(to_half(s)) : s;
    }
}

float tree_of_lanes(const uint8_t* lanes_of_repeat, Type type, const uint64_t* mask, int first, int count) {
  float x[128] = {};
  int width = 1;
  while (width < count) width *= 2;
  for (int i = 0; i < count; ++i)
    if (mask[(first + i) / 64] >> ((first + i) % 64) & 1) x[i] = (float)item(lanes_of_repeat, type, first + i);
  tree(x, width, type == F16);
  return x[0];
}

double sum_of_lanes(const uint8_t* lanes_of_repeat, Type type, const uint64_t* mask, int first, int count) {
  if (type == F32 || type == F16) return tree_of_lanes(lanes_of_repeat, type, mask, first, count);
  double sum = 0;
  for (int i = first; i < first + count; ++i)
    if (mask[i / 64] >> (i % 64) & 1) sum += item(lanes_of_repeat, type, i);
  return sum;
}

Best best_of_lanes(const uint8_t* lanes_of_repeat, Type type, const uint64_t* mask, int first, int count,
                   bool maximum) {
  Best best{0, 0, false};
  for (int i = first; i < first + count; ++i) {
    if (!(mask[i / 64] >> (i % 64) & 1)) continue;
    const double x = item(lanes_of_repeat, type, i);
    if (!best.any || (maximum ? x > best.value : x < best.value)) best = {x, i, true};
  }
  return best;
}

// A walk with `count` contiguous lanes as repeats of 256 bytes; the last mask may be partial.
struct Repeats {
  int count, lanes;
  uint64_t last[2];
};
Repeats repeats_of(const Walk& walk, Type type) {
  const int lanes_per_repeat = 256 / kTypeBytes[type];
  if (walk.count < 0) return {walk.repeats, lanes_per_repeat, {walk.mask[0], walk.mask[1]}};
  const int64_t n = walk.count;
  const int repeats = (int)((n + lanes_per_repeat - 1) / lanes_per_repeat),
            rest = (int)(n - (int64_t)(repeats - 1) * lanes_per_repeat);
  return {repeats,
          lanes_per_repeat,
          {rest >= 64 ? ~0ull : (1ull << rest) - 1, rest >= 128 ? ~0ull
                                                    : rest > 64 ? (1ull << (rest - 64)) - 1
                                                                : 0}};
}

void store_item(Pipe& pipe, View d, Type type, double x, Where) {
  put_item(store(pipe, *d.memory, d.offset, kTypeBytes[type], "the destination"), type, x);
}

void store_best(Pipe& pipe, View d, Type type, const Best& best, ReduceOrder order, Where where) {
  const int size = kTypeBytes[type];
  const auto put_index = [&](uint64_t offset, int bytes) {
    const uint64_t index = (uint64_t)best.index;
    memcpy(store(pipe, *d.memory, offset, (uint64_t)bytes, "the destination"), &index, (size_t)bytes);
  };
  switch (order) {
    case ReduceOrder::ORDER_ONLY_VALUE: return store_item(pipe, d, type, best.value, where);
    case ReduceOrder::ORDER_ONLY_INDEX: return put_index(d.offset, 4);
    case ReduceOrder::ORDER_VALUE_INDEX:
      store_item(pipe, d, type, best.value, where);
      return put_index(d.offset + size, size);
    default:
      put_index(d.offset, size);
      d.offset += size;
      return store_item(pipe, d, type, best.value, where);
  }
}

int order_bytes(ReduceOrder order, Type type) {
  return order == ReduceOrder::ORDER_ONLY_VALUE   ? kTypeBytes[type]
         : order == ReduceOrder::ORDER_ONLY_INDEX ? 4
                                                  : 2 * kTypeBytes[type];
}

}  // namespace

Walk reduce_walk(const uint64_t* mask, bool by_bit, bool set_mask, int repeats, int block_stride, int repeat_stride,
                 Type type, Where where) {
  Walk walk = sliced(mask, by_bit, set_mask, repeats, AscendC::UnaryRepeatParams(), type, where);
  walk.block_stride[1] = (uint16_t)block_stride;
  walk.repeat_stride[1] = (uint16_t)repeat_stride;
  return walk;
}

void reduce_all(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int, Where where) {
  need_type(op, type, r.how != ReduceType::SUM, where);
  Pipe& pipe = begin(kV, op, where);
  need_vector_operand(pipe, a, "the source");
  const Repeats repeats = repeats_of(walk, type);
  const uint64_t whole[2] = {~0ull, ~0ull};
  const uint8_t* flat =
      walk.count >= 0 ? load(pipe, *a.memory, a.offset, lane_bytes(type, walk.count), "the source") : nullptr;
  std::vector<float> sums;
  Best best{0, 0, false};
  for (int i = 0; i < repeats.count; ++i) {
    uint8_t gathered[256] = {};
    if (flat == nullptr) gather_repeat(pipe, a, type, walk, 1, i, gathered, "the source");
    const uint8_t* lanes_of_repeat = flat != nullptr ? flat + (int64_t)i * 256 : gathered;
    const uint64_t* mask = flat != nullptr && i + 1 < repeats.count ? whole : repeats.last;
    if (r.how == ReduceType::SUM) {
      sums.push_back((float)sum_of_lanes(lanes_of_repeat, type, mask, 0, repeats.lanes));
      continue;
    }
    const Best here = best_of_lanes(lanes_of_repeat, type, mask, 0, repeats.lanes, r.how == ReduceType::MAX);
    if (here.any && (!best.any || (r.how == ReduceType::MAX ? here.value > best.value : here.value < best.value)))
      best = {here.value, here.index + (int64_t)i * repeats.lanes, true};
  }
  if (r.how == ReduceType::SUM) {
    size_t width = 1;
    while (width < sums.size()) width *= 2;
    sums.resize(width, 0.0f);
    tree(sums.data(), (int)width, type == F16);
    store_item(pipe, d, type, sums[0], where);
  } else {
    store_best(pipe, d, type, best, r.index ? ReduceOrder::ORDER_VALUE_INDEX : ReduceOrder::ORDER_ONLY_VALUE, where);
  }
  done(pipe, op, where, (uint32_t)repeats.count * 256, (uint64_t)repeats.count * (uint64_t)repeats.lanes);
}

void reduce_repeats(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int target_stride, Where where) {
  need_type(op, type, true, where);
  Pipe& pipe = begin(kV, op, where);
  need_vector_operand(pipe, a, "the source");
  const Repeats repeats = repeats_of(walk, type);
  const ReduceOrder order = r.how == ReduceType::SUM ? ReduceOrder::ORDER_ONLY_VALUE : r.order;
  const int unit = order_bytes(order, type);
  if (d.offset % (uint64_t)unit != 0)
    give_up("%s at %s:%d: the destination starts at byte %llu, and must start at a multiple of %d", kOpNames[op],
            where.file, where.line, (unsigned long long)d.offset, unit);
  for (int i = 0; i < repeats.count; ++i) {
    uint8_t lanes_of_repeat[256] = {};
    gather_repeat(pipe, a, type, walk, 1, i, lanes_of_repeat, "the source");
    const View to{d.memory, d.offset + (uint64_t)i * (uint64_t)target_stride * (uint64_t)unit};
    if (r.how == ReduceType::SUM)
      store_item(pipe, to, type, sum_of_lanes(lanes_of_repeat, type, walk.mask, 0, repeats.lanes), where);
    else
      store_best(pipe, to, type,
                 best_of_lanes(lanes_of_repeat, type, walk.mask, 0, repeats.lanes, r.how == ReduceType::MAX), order,
                 where);
  }
  done(pipe, op, where, (uint32_t)repeats.count * 256, (uint64_t)repeats.count * (uint64_t)repeats.lanes);
}

void reduce_blocks(Op op, Reduction r, Type type, View d, View a, const Walk& walk, int target_stride, Where where) {
  need_type(op, type, false, where);
  Pipe& pipe = begin(kV, op, where);
  need_vector_operand(pipe, a, "the source");
  const int size = kTypeBytes[type], per_block = 32 / size;
  for (int i = 0; i < walk.repeats; ++i) {
    uint8_t lanes_of_repeat[256] = {};
    gather_repeat(pipe, a, type, walk, 1, i, lanes_of_repeat, "the source");
    for (int block = 0; block < 8; ++block) {
      if (active_bytes(walk, block * per_block, per_block, size) == 0) continue;
      const View to{d.memory,
                    d.offset + ((uint64_t)i * (uint64_t)target_stride * 8 + (uint64_t)block) * (uint64_t)size};
      if (r.how == ReduceType::SUM)
        store_item(pipe, to, type, sum_of_lanes(lanes_of_repeat, type, walk.mask, block * per_block, per_block), where);
      else
        store_item(
            pipe, to, type,
            best_of_lanes(lanes_of_repeat, type, walk.mask, block * per_block, per_block, r.how == ReduceType::MAX)
                .value,
            where);
    }
  }
  done(pipe, op, where, (uint32_t)walk.repeats * 256, (uint64_t)walk.repeats * 8 * (uint64_t)per_block);
}

// Each repeat spreads eight elements over eight blocks.
void run_brcb(Type type, View d, View a, int repeats, int block_stride, int repeat_stride, Where where) {
  Pipe& pipe = begin(kV, op_Brcb, where);
  need_vector_operand(pipe, d, "the destination");
  need_vector_operand(pipe, a, "the source");
  const int size = kTypeBytes[type];
  if (size != 2 && size != 4)
    give_up("Brcb at %s:%d: the device has no such instruction for %s", where.file, where.line, kTypeNames[type]);
  for (int r = 0; r < repeats; ++r) {
    const uint8_t* eight =
        load(pipe, *a.memory, a.offset + (uint64_t)r * 8 * (uint64_t)size, 8 * (uint64_t)size, "the source");
    for (int k = 0; k < 8; ++k) {
      uint8_t* to =
          store(pipe, *d.memory,
                d.offset + ((uint64_t)r * (uint64_t)repeat_stride + (uint64_t)k * (uint64_t)block_stride) * 32, 32,
                "the destination");
      for (int i = 0; i < 32; i += size) memcpy(to + i, eight + k * size, (size_t)size);
    }
  }
  done(pipe, op_Brcb, where, (uint32_t)repeats * 256, (uint64_t)repeats * 8);
}

}  // namespace twin
