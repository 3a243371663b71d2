// Asynchronous copies: cp.async, bulk copies and reductions, tensor (TMA) loads and stores.
#include <cmath>

#include "memory.h"
#include "small_float.h"
#include "tensor_map.h"

namespace ptxemu {

void group_commit(Warp& w, Stream& stream, Race::Kind kind) {
  Stream::Group group{w.mask, {}, 0};
  std::vector<AsyncPtr> rest;
  for (AsyncPtr& op : stream.open) (op->lanes & w.mask ? group.ops : rest).push_back(op);
  stream.open.swap(rest);
  if (Race* race = w.cta->cluster->race.get()) group.clock = race->now(race->agent(kind, *w.cta, w.index));
  stream.groups.push_back(std::move(group));
}

// Completes all but the `allowed` youngest groups of the active lanes.
void group_wait(Warp& w, Stream& stream, Race::Kind kind, u32 allowed) {
  u32 seen[kLanes] = {};
  std::vector<size_t> finished;
  for (size_t i = stream.groups.size(); i-- > 0;) {
    const Stream::Group& g = stream.groups[i];
    bool due = false;
    for_lanes(g.lanes & w.mask, [&](u32 l) { due |= seen[l]++ >= allowed; });
    if (due) finished.push_back(i);
  }
  Race* race = w.cta->cluster->race.get();
  for (size_t k = finished.size(); k-- > 0;) {
    Stream::Group& g = stream.groups[finished[k]];
    for (AsyncPtr& op : g.ops) op->run();
    if (race) race->join(race->warp(w), race->agent(kind, *w.cta, w.index), g.clock);
  }
  for (size_t i : finished) stream.groups.erase(stream.groups.begin() + static_cast<std::ptrdiff_t>(i));
}

namespace {

Race* detector(Warp& w) { return w.cta->cluster->race.get(); }

void mark_unfenced(Warp& w, Cta& cta, u32 offset) {
  if (cta.unfenced[offset / 16] == w.tag()) return;
  cta.unfenced[offset / 16] = w.tag();
  w.unfenced.push_back({&cta, offset / 16});
}

// x: shared address, global address, source size (-1: all), ignore-src predicate (-1). imm: bytes
// Writes through the generic proxy, unlike the bulk copies.
Status cp_async(Warp& w, const Instruction& in) {
  const Addresses to(w, in.x), from(w, in.x + 3);
  const u32 bytes = static_cast<u32>(in.imm);
  struct Piece {
    u32 offset, size;
    const u8* source;
  };
  std::vector<Piece> pieces;
  const i32 line = w.line;
  Race* race = detector(w);
  const u32 agent = race ? race->issue(Race::kCpAsyncOf, *w.cta, w.index, w) : 0;
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, to[l], bytes, false, "cp.async");
    u32 size = in.x[6] < 0 ? bytes : row<u32>(w, in.x[6])[l];
    if (in.x[7] >= 0 && predicate(w, in.x[7]) >> l & 1) size = 0;
    if (size > bytes) fail("cp.async: source size %u of %u bytes", size, bytes);
    if (to[l] % bytes || from[l] % bytes)
      fail("cp.async: misaligned addresses %#llx, %#llx", (unsigned long long)to[l], (unsigned long long)from[l]);
    pieces.push_back({p.offset, size, size ? w.cta->machine->global(from[l], size, false) : nullptr});
    if (race) race->shared(*w.cta, agent, p.offset, bytes, true, line);
  });
  w.cta->cluster->submit(w.cp_async.open, kCpAsync, w.mask, [&w, pieces = std::move(pieces), bytes] {
    for (const Piece& p : pieces) {
      u8* d = w.cta->shared.data() + p.offset;
      if (p.size) std::memcpy(d, p.source, p.size);
      std::memset(d + p.size, 0, bytes - p.size);
      mark_unfenced(w, *w.cta, p.offset);
    }
  });
  return Status::kNext;
}
Status cp_async_commit(Warp& w, const Instruction&) {
  group_commit(w, w.cp_async, Race::kCpAsyncOf);
  return Status::kNext;
}
// imm: groups that may be pending
Status cp_async_wait(Warp& w, const Instruction& in) {
  group_wait(w, w.cp_async, Race::kCpAsyncOf, static_cast<u32>(in.imm));
  return Status::kNext;
}
Status cp_async_wait_all(Warp& w, const Instruction&) {
  group_commit(w, w.cp_async, Race::kCpAsyncOf);
  group_wait(w, w.cp_async, Race::kCpAsyncOf, 0);
  return Status::kNext;
}
// One arrival a thread once its cp.async so far are done. x: mbarrier. imm: noinc; without it the arrival is expected
// here.
Status cp_async_arrive(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  std::vector<AsyncPtr> prior = w.cp_async.open;
  for (auto& g : w.cp_async.groups) prior.insert(prior.end(), g.ops.begin(), g.ops.end());
  Race* race = detector(w);
  std::vector<u32> bars;
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, false, "cp.async.mbarrier.arrive");
    Mbarrier& b = p.cta->mbarrier(static_cast<u32>(a[l]));
    if (!in.imm) ++b.pending;
    bars.push_back(static_cast<u32>(a[l]));
  });
  Clock clock;
  if (race) clock = race->snapshot(race->issue(Race::kCpAsyncOf, *w.cta, w.index, w));
  w.cta->cluster->submit(w.cp_async.open, kCpAsync, w.mask, [&w, prior, bars, clock, race] {
    for (const AsyncPtr& op : prior) op->run();
    for (u32 bar : bars) {
      if (race) race->release(Race::mbarrier_object(*w.cta, bar & 0xFFFFFF), clock);
      w.cta->arrive(bar, 1, 0);
    }
  });
  return Status::kNext;
}

// ---- reductions into memory ----

enum Reduction { kCopy, kAdd, kMin, kMax, kAnd, kOr, kXor };
enum Type { kU32, kS32, kU64, kS64, kF16, kBf16, kF32, kF64 };

template <class T>
void reduce_as(Reduction r, u8* to, const u8* from, u32 bytes) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) {
    T x, y;
    std::memcpy(&x, to + i, sizeof(T));
    std::memcpy(&y, from + i, sizeof(T));
    if (r == kAdd) x = static_cast<T>(x + y);
    if (r == kMin) x = std::min(x, y);
    if (r == kMax) x = std::max(x, y);
    if constexpr (std::is_integral_v<T>) {
      if (r == kAnd) x &= y;
      if (r == kOr) x |= y;
      if (r == kXor) x ^= y;
    }
    std::memcpy(to + i, &x, sizeof(T));
  }
}
void reduce(Reduction r, Type t, u8* to, const u8* from, u32 bytes) {
  if (r == kCopy) {
    std::memcpy(to, from, bytes);
    return;
  }
  switch (t) {
    case kU32:
      return reduce_as<u32>(r, to, from, bytes);
    case kS32:
      return reduce_as<i32>(r, to, from, bytes);
    case kU64:
      return reduce_as<u64>(r, to, from, bytes);
    case kS64:
      return reduce_as<i64>(r, to, from, bytes);
    case kF32:
      return reduce_as<float>(r, to, from, bytes);
    case kF64:
      return reduce_as<double>(r, to, from, bytes);
    case kF16:
    case kBf16:
      for (u32 i = 0; i < bytes; i += 2) {
        u16 x, y;
        std::memcpy(&x, to + i, 2);
        std::memcpy(&y, from + i, 2);
        const float a = t == kF16 ? from_f16(x) : from_bf16(x), b = t == kF16 ? from_f16(y) : from_bf16(y);
        const float c = r == kAdd ? a + b : r == kMin ? std::fmin(a, b) : std::fmax(a, b);
        x = t == kF16 ? to_f16(double{c}) : to_bf16(c);
        std::memcpy(to + i, &x, 2);
      }
  }
}

// ---- bulk copies ----

struct Target {
  Cta* cta;
  u32 offset, bar;
};

// The CTAs that a load writes: the one that the address names, or those of a multicast mask, at the same offsets.
std::vector<Target> targets(Warp& w, u64 to, u64 bar, u32 bytes, i32 mask_operand, u32 lane, const char* what) {
  std::vector<Target> out;
  const SharedPlace p = shared_place(w, to, bytes, true, what);
  if (mask_operand < 0) {
    out.push_back({p.cta, p.offset, static_cast<u32>(bar)});
  } else {
    const u32 mask = row<u16>(w, mask_operand)[lane], low = (1u << kRankShift) - 1;
    if (mask == 0 || mask >> w.cta->cluster->ctas.size()) fail("%s: multicast mask %#x", what, mask);
    for_lanes(mask, [&](u32 r) {
      Cta& cta = *w.cta->cluster->ctas[r];
      out.push_back({&cta, p.offset, r << kRankShift | (static_cast<u32>(bar) & low)});
    });
  }
  for (const Target& t : out) w.cta->cluster->owner(t.bar).mbarrier(t.bar);
  return out;
}

// Announces an asynchronous write of shared memory to the checks; returns what completion releases.
Clock announce(Warp& w, const Target& t, const std::vector<u32>& chunks, u32 chunk_bytes, const char* what) {
  for (u32 c : chunks) check_proxy(*t.cta, c, chunk_bytes, what, w.line);
  Race* race = detector(w);
  if (!race) return {};
  const u32 agent = race->issue(Race::kTmaOf, *t.cta, t.bar & 0xFFFFFF, w);
  race->shared_chunks(*t.cta, agent, chunks, chunk_bytes, true, w.line);
  return race->snapshot(agent);
}
void finish(Warp& w, const Target& t, const Clock& clock, u32 bytes) {
  Cta& owner = w.cta->cluster->owner(t.bar);
  if (Race* race = detector(w)) race->release(Race::mbarrier_object(owner, t.bar & 0xFFFFFF), clock);
  owner.complete_bytes(t.bar, bytes);
}

// Global (imm 0) or shared (imm 1) to shared. x: destination, source, mbarrier, size, multicast mask (-1).
// imm: bit 0, then Reduction << 8, Type << 16.
Status bulk_load(Warp& w, const Instruction& in) {
  const Reduction r = static_cast<Reduction>(in.imm >> 8 & 255);
  const Type type = static_cast<Type>(in.imm >> 16 & 255);
  const bool from_shared = in.imm & 1;
  for_lanes(w.mask, [&](u32 l) {
    const u64 to = address_at(w, in.x, l), from = address_at(w, in.x + 3, l), bar = address_at(w, in.x + 6, l);
    const u32 bytes = row<u32>(w, in.x[9])[l];
    if (bytes % 16 || to % 16 || from % 16) fail("bulk copy: addresses and size must be multiples of 16 bytes");
    if (bytes == 0) return;
    const u8* source;
    if (from_shared) {
      const SharedPlace p = shared_place(w, from, bytes, false, "bulk copy");
      check_proxy(*p.cta, p.offset, bytes, "a bulk copy", w.line);
      source = p.cta->shared.data() + p.offset;
    } else {
      source = w.cta->machine->global(from, bytes, false);
    }
    for (const Target& t : targets(w, to, bar, bytes, in.x[10], l, "bulk copy")) {
      const Clock clock = announce(w, t, {t.offset}, bytes, "a bulk copy");
      w.cta->cluster->submit(t.cta->tma, kTma, 1u << l, [=, &w] {
        reduce(r, type, t.cta->shared.data() + t.offset, source, bytes);
        finish(w, t, clock, bytes);
      });
    }
  });
  return Status::kNext;
}
// Shared to global, in a bulk group. x: destination, source, size. imm: Reduction << 8, Type << 16.
Status bulk_store(Warp& w, const Instruction& in) {
  const Reduction r = static_cast<Reduction>(in.imm >> 8 & 255);
  const Type type = static_cast<Type>(in.imm >> 16 & 255);
  for_lanes(w.mask, [&](u32 l) {
    const u64 to = address_at(w, in.x, l), from = address_at(w, in.x + 3, l);
    const u32 bytes = row<u32>(w, in.x[6])[l];
    if (bytes % 16 || to % 16 || from % 16) fail("bulk copy: addresses and size must be multiples of 16 bytes");
    if (bytes == 0) return;
    const SharedPlace p = shared_place(w, from, bytes, false, "bulk copy");
    check_proxy(*p.cta, p.offset, bytes, "a bulk copy", w.line);
    if (Race* race = detector(w))
      race->shared(*w.cta, race->issue(Race::kBulkOf, *w.cta, w.index, w), p.offset, bytes, false, w.line);
    u8* d = w.cta->machine->global(to, bytes, true);
    ++w.cta->machine->progress;
    w.cta->cluster->submit(w.bulk.open, kBulkStore, 1u << l,
                           [=] { reduce(r, type, d, p.cta->shared.data() + p.offset, bytes); });
  });
  return Status::kNext;
}
Status bulk_commit(Warp& w, const Instruction&) {
  group_commit(w, w.bulk, Race::kBulkOf);
  return Status::kNext;
}
Status bulk_wait(Warp& w, const Instruction& in) {
  group_wait(w, w.bulk, Race::kBulkOf, static_cast<u32>(in.imm));
  return Status::kNext;
}

// ---- tensor copies ----

TensorMap read_map(Warp& w, u64 address) {
  const u64 window = address >> 56 << 56;
  const u8* bytes;
  if (address % 64) fail("tensor map at a misaligned address");
  if (window == kParamWindow) {
    if (address - window + 128 > w.cta->machine->spec->param_bytes) fail("tensor map outside the parameters");
    bytes = w.cta->machine->spec->params + (address - window);
  } else {
    bytes = w.cta->machine->global(address, 128, false);
  }
  const TensorMap map(bytes);
  if (map.row_bytes() % 16) fail("tensor map: a box row of %u bytes", map.row_bytes());
  if (map.span() && map.row_bytes() != map.span())
    fail("tensor map: box rows of %u bytes under a swizzle of %u aren't implemented", map.row_bytes(), map.span());
  return map;
}

// Calls `row(global address, first and last + 1 byte in bounds, offset in the box)` for every row of the box that
// begins at `at`; the range is empty for a row that is out of bounds.
template <class F>
void for_rows(const TensorMap& map, const i32* at, F row) {
  const u32 rows = map.rows(), size = map.element_size();
  i64 low = std::min<i64>(std::max<i64>(0, -i64{at[0]}), map.box[0]);
  i64 high = std::max<i64>(low, std::min<i64>(map.box[0], i64{map.last[0]} + 1 - at[0]));
  for (u32 r = 0; r < rows; ++r) {
    u64 address = map.base + static_cast<u64>(i64{at[0]} * size);
    bool inside = true;
    u32 rest = r;
    for (u32 d = 1; d < map.rank; ++d) {
      const i64 c = i64{at[d]} + rest % map.box[d];
      rest /= map.box[d];
      inside &= c >= 0 && c <= i64{map.last[d]};
      address += static_cast<u64>(c) * map.strides[d - 1];
    }
    // A base may be moved back by a multiple of a stride, to wrap in 57 bits (FA4's ragged stores do that).
    address &= (u64{1} << 57) - 1;
    row(address, inside ? static_cast<u32>(low) * size : 0, inside ? static_cast<u32>(high) * size : 0,
        r * map.row_bytes());
  }
}

std::vector<u32> chunks_of(const TensorMap& map, u32 offset) {
  std::vector<u32> out;
  for (u32 i = 0; i < map.bytes(); i += 16) out.push_back(swizzled(offset + i, map.span()));
  return out;
}

void tensor_load(Machine& machine, const TensorMap& map, const std::array<i32, 5>& at, u8* shared, u32 offset) {
  std::vector<u8> line(map.row_bytes());
  for_rows(map, at.data(), [&](u64 address, u32 low, u32 high, u32 box_offset) {
    std::fill(line.begin(), line.end(), u8{0});
    if (high > low) std::memcpy(line.data() + low, machine.global(address + low, high - low, false), high - low);
    for (u32 i = 0; i < map.row_bytes(); i += 16)
      std::memcpy(shared + swizzled(offset + box_offset + i, map.span()), line.data() + i, 16);
  });
}
void tensor_store(Machine& machine, const TensorMap& map, const std::array<i32, 5>& at, const u8* shared, u32 offset,
                  Reduction r) {
  static constexpr Type types[] = {kU32, kU32, kU32, kS32, kU64, kS64, kF16, kF32, kF64, kBf16};
  std::vector<u8> line(map.row_bytes());
  for_rows(map, at.data(), [&](u64 address, u32 low, u32 high, u32 box_offset) {
    for (u32 i = 0; i < map.row_bytes(); i += 16)
      std::memcpy(line.data() + i, shared + swizzled(offset + box_offset + i, map.span()), 16);
    if (high > low)
      reduce(r, types[map.type], machine.global(address + low, high - low, true), line.data() + low, high - low);
  });
}

std::array<i32, 5> coordinates(Warp& w, const i32* x, u32 count, const TensorMap& map, u32 lane) {
  if (count != map.rank) fail("%u coordinates for a tensor map of rank %u", count, map.rank);
  std::array<i32, 5> at{};
  for (u32 d = 0; d < count; ++d) at[d] = row<i32>(w, x[d])[lane];
  return at;
}

// x: destination, map, mbarrier, multicast mask (-1), coordinates. imm: their number.
Status tma_load(Warp& w, const Instruction& in) {
  for_lanes(w.mask, [&](u32 l) {
    const TensorMap map = read_map(w, address_at(w, in.x + 3, l));
    const auto at = coordinates(w, in.x + 10, static_cast<u32>(in.imm), map, l);
    const u64 to = address_at(w, in.x, l), bar = address_at(w, in.x + 6, l);
    if (to % 128) fail("TMA load: destination %#llx isn't a multiple of 128", (unsigned long long)to);
    for (const Target& t : targets(w, to, bar, map.bytes(), in.x[9], l, "TMA load")) {
      const Clock clock = announce(w, t, chunks_of(map, t.offset), 16, "a TMA load");
      w.cta->cluster->submit(t.cta->tma, kTma, 1u << l, [=, &w] {
        tensor_load(*w.cta->machine, map, at, t.cta->shared.data(), t.offset);
        finish(w, t, clock, map.bytes());
      });
    }
  });
  return Status::kNext;
}
// x: map, source, coordinates. imm: their number, Reduction << 8.
Status tma_store(Warp& w, const Instruction& in) {
  const Reduction r = static_cast<Reduction>(in.imm >> 8 & 255);
  for_lanes(w.mask, [&](u32 l) {
    const TensorMap map = read_map(w, address_at(w, in.x, l));
    const auto at = coordinates(w, in.x + 6, in.imm & 255, map, l);
    const u64 from = address_at(w, in.x + 3, l);
    if (from % 128) fail("TMA store: source %#llx isn't a multiple of 128", (unsigned long long)from);
    if (r != kCopy && map.element_size() == 1) fail("TMA reduction of bytes");
    const SharedPlace p = shared_place(w, from, map.bytes(), false, "TMA store");
    const std::vector<u32> chunks = chunks_of(map, p.offset);
    for (u32 c : chunks) check_proxy(*p.cta, c, 16, "a TMA store", w.line);
    if (Race* race = detector(w))
      race->shared_chunks(*p.cta, race->issue(Race::kBulkOf, *w.cta, w.index, w), chunks, 16, false, w.line);
    ++w.cta->machine->progress;
    Machine* machine = w.cta->machine;
    w.cta->cluster->submit(w.bulk.open, kBulkStore, 1u << l,
                           [=] { tensor_store(*machine, map, at, p.cta->shared.data(), p.offset, r); });
  });
  return Status::kNext;
}

}  // namespace

void register_copies() {
  register_handler("cp.async", cp_async);
  register_handler("cp.async.commit", cp_async_commit);
  register_handler("cp.async.wait", cp_async_wait);
  register_handler("cp.async.wait_all", cp_async_wait_all);
  register_handler("cp.async.arrive", cp_async_arrive);
  register_handler("bulk.load", bulk_load);
  register_handler("bulk.store", bulk_store);
  register_handler("bulk.commit", bulk_commit);
  register_handler("bulk.wait", bulk_wait);
  register_handler("tma.load", tma_load);
  register_handler("tma.store", tma_store);
}

}  // namespace ptxemu
