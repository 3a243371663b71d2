// tcgen05: tensor memory's allocation, and its transfers from and to registers and shared memory.
#include "tensor_memory.h"

namespace ptxemu {

void require_allocated(const Cta& cta, u32 column, u32 count, const char* what) {
  for (auto [first, size] : cta.tmem_allocations)
    if (column >= first && column + count <= first + size) return;
  fail("%s: columns %u to %u of tensor memory aren't allocated", what, column, column + count - 1);
}

void touch_operand(Warp& w, u32 agent, const Operand& o, u32 rows, u32 k, const char* what) {
  Cta& cta = *w.cta;
  for (u32 at : o.granules(0, rows, k)) {
    if (at + 16 > cta.shared.size()) fail("%s: an operand reaches outside shared memory", what);
    check_proxy(cta, at, 16, what, w.line);
    if (Race* race = detector(w)) race->shared(cta, agent, at, 16, false, w.line);
  }
}

namespace {

// x: shared address for the result, number of columns
Status alloc(Warp& w, const Instruction& in) {
  w.require_converged("tcgen05.alloc");
  Cta& cta = *w.cta;
  if (cta.tmem_relinquished) fail("tcgen05.alloc after relinquish_alloc_permit");
  const u32 n = uniform<u32>(w, in.x[3], "tcgen05.alloc");
  if (n < 32 || n > kColumns || (n & (n - 1))) fail("tcgen05.alloc of %u columns", n);
  if (cta.tmem.empty()) cta.tmem.assign(size_t{kRows} * kColumns, kFull);
  u32 at = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (auto [first, size] : cta.tmem_allocations)
      if (at < first + size && first < at + n) at = (first + size + n - 1) / n * n, moved = true;
  }
  // Hardware would wait for another warp to free some; nothing here does.
  if (at + n > kColumns) fail("tcgen05.alloc of %u columns: tensor memory is exhausted", n);
  cta.tmem_allocations.push_back({at, n});
  const SharedPlace p = shared_place(w, address_at(w, in.x, first_lane(w)), 4, false, "tcgen05.alloc");
  if (Race* race = detector(w)) race->shared(cta, race->warp(w), p.offset, 4, true, w.line);
  std::memcpy(cta.shared.data() + p.offset, &at, 4);
  ++cta.machine->progress;
  return Status::kNext;
}
Status dealloc(Warp& w, const Instruction& in) {
  w.require_converged("tcgen05.dealloc");
  Cta& cta = *w.cta;
  const u32 at = uniform<u32>(w, in.x[0], "tcgen05.dealloc"), n = uniform<u32>(w, in.x[1], "tcgen05.dealloc");
  for (size_t i = 0; i < cta.tmem_allocations.size(); ++i)
    if (cta.tmem_allocations[i] == std::make_pair(at, n)) {
      for (const AsyncPtr& op : cta.tensor)
        if (!op->done && op->lanes)
          cta.machine->report("tcgen05.dealloc with tensor core operations in flight (PTX line %d)", w.line);
      cta.tmem_allocations.erase(cta.tmem_allocations.begin() + static_cast<std::ptrdiff_t>(i));
      ++cta.machine->progress;
      return Status::kNext;
    }
  fail("tcgen05.dealloc of %u columns at %#x, which were not allocated", n, at);
}
Status relinquish(Warp& w, const Instruction&) {
  w.require_converged("tcgen05.relinquish_alloc_permit");
  w.cta->tmem_relinquished = true;
  return Status::kNext;
}

// ---- registers ----

// The order is that of SHAPES in encode_tensor.py.
enum class Shape { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };

// A transfer of `count` registers a thread. imm: their number, Shape << 16, two columns a register << 20, the second
// half's first column << 32.
struct Transfer {
  u32 count, split;
  Shape shape;
  bool halves;  // .pack::16b, .unpack::16b: the low halves of two neighbouring columns
  u32 lane = 0, column = 0;

  explicit Transfer(i64 imm)
      : count(imm & 0xFFFF),
        split(static_cast<u32>(imm >> 32)),
        shape(static_cast<Shape>(imm >> 16 & 15)),
        halves(imm >> 20 & 1) {}

  // Lane and column of register r of thread l, from the address on: matrix fragments of the PTX manual, as in CUTLASS's
  // copy_traits_sm100.hpp. 16 lanes wide, a group of four threads has a row.
  std::pair<u32, u32> place(u32 r, u32 l) const {
    switch (shape) {
      case Shape::k32x32b:
        return {l, r};
      case Shape::k16x64b:
        return {l / 4 + 8 * (l & 1), (l >> 1 & 1) + 2 * r};
      case Shape::k16x128b:
        return {l / 4 + 8 * (r & 1), l % 4 + 4 * (r / 2)};
      case Shape::k16x256b:
        return {l / 4 + 8 * (r >> 1 & 1), (r & 1) + 2 * (l % 4) + 8 * (r / 4)};
      case Shape::k16x32bx2:
        return {l % 16, r + (l < 16 ? 0 : split)};
    }
    return {0, 0};
  }
  u32 columns() const {                        // of 32 bits, before halves are spread
    const u32 a_register[] = {1, 2, 2, 2, 1};  // 16x128b and 16x256b: two registers have a column
    return count * a_register[static_cast<int>(shape)];
  }
  // A whole warp's access: address, bounds, race checks by `agent`.
  void begin(Warp& w, const i32* x, const char* what) {
    w.require_converged(what);
    const Addresses a(w, x);
    for (u32 l = 1; l < kLanes; ++l)
      if (w.mask >> l & 1 && a[l] != a[0]) fail("%s: the address differs between lanes", what);
    lane = static_cast<u32>(a[0]) >> 16, column = static_cast<u32>(a[0]) & 0xFFFF;
    const u32 first = 32 * (w.index % 4);
    if (lane != first && (lane != first + 16 || shape == Shape::k32x32b))
      fail("%s: warp %u reaches lanes %u to %u only, not %u", what, w.index, first, first + 31, lane);
    for (u32 at : starts()) require_allocated(*w.cta, at, width(), what);
  }
  void check(Warp& w, u32 agent, bool write) const {
    for (u32 at : starts()) detector(w)->tmem(*w.cta, agent, 1u << (lane / 32), at, width(), write, w.line);
  }
  std::vector<u32> starts() const {
    if (shape == Shape::k16x32bx2) return {column, column + split};
    return {column};
  }
  u32 width() const { return columns() << halves; }
  size_t at(u32 r, u32 l) const {
    const auto [y, x] = place(r, l);
    return size_t{lane + y} * kColumns + column + (x << halves);
  }
};

// x: address, registers.
// Complete at issue: flash-attn-4's kernels have no tcgen05.wait::ld before they use the registers.
Status load(Warp& w, const Instruction& in) {
  Transfer t(in.imm);
  t.begin(w, in.x, "tcgen05.ld");
  if (Race* race = detector(w)) t.check(w, race->warp(w), false);
  const u32* tmem = w.cta->tmem.data();
  for (u32 r = 0; r < t.count; ++r) {
    u32* d = row<u32>(w, in.x[3 + r]);
    for (u32 l = 0; l < kLanes; ++l) {
      const u32* from = tmem + t.at(r, l);
      d[l] = t.halves ? (from[0] & 0xFFFF) | from[1] << 16 : *from;
    }
  }
  return Status::kNext;
}
// tcgen05.ld.red of shape 32x32b: also the minimum or maximum of a lane's columns. x: address, its register, registers.
// imm: as above, and max << 24, abs << 25, NaN << 26.
Status load_reduced(Warp& w, const Instruction& in) {
  const bool greatest = in.imm >> 24 & 1, absolute = in.imm >> 25 & 1, keep_nan = in.imm >> 26 & 1;
  Transfer t(in.imm);
  t.begin(w, in.x, "tcgen05.ld.red");
  if (Race* race = detector(w)) t.check(w, race->warp(w), false);
  float* best = row<float>(w, in.x[3]);
  for (u32 l = 0; l < kLanes; ++l) {
    float r = float_of(kNan);
    bool nan = false;
    for (u32 j = 0; j < t.count; ++j) {
      const u32 bits = w.cta->tmem[t.at(j, l)];
      row<u32>(w, in.x[4 + j])[l] = bits;
      const float v = absolute ? std::fabs(float_of(bits)) : float_of(bits);
      nan |= v != v;
      r = greatest ? std::fmax(r, v) : std::fmin(r, v);
    }
    best[l] = nan && keep_nan ? float_of(kNan) : r;
  }
  return Status::kNext;
}
// The upper halves of what .unpack::16b writes are nobody's business: all ones.
Status store(Warp& w, const Instruction& in) {
  Transfer t(in.imm);
  t.begin(w, in.x, "tcgen05.st");
  std::vector<u32> data(size_t{t.count} * kLanes);
  for (u32 r = 0; r < t.count; ++r) std::copy_n(row<u32>(w, in.x[3 + r]), kLanes, &data[r * kLanes]);
  if (Race* race = detector(w)) t.check(w, race->issue(Race::kTmemStoreOf, *w.cta, w.index, w), true);
  Cta* cta = w.cta;
  ++cta->machine->progress;
  cta->cluster->submit(w.tmem_stores, kTmemStore, w.mask, [cta, data = std::move(data), t] {
    for (u32 r = 0; r < t.count; ++r)
      for (u32 l = 0; l < kLanes; ++l) {
        u32* to = &cta->tmem[t.at(r, l)];
        const u32 value = data[r * kLanes + l];
        if (t.halves)
          to[0] = value | 0xFFFF0000, to[1] = value >> 16 | 0xFFFF0000;
        else
          *to = value;
      }
  });
  return Status::kNext;
}
Status wait_store(Warp& w, const Instruction&) {
  w.require_converged("tcgen05.wait::st");
  for (const AsyncPtr& op : w.tmem_stores) op->run();
  w.tmem_stores.clear();
  if (Race* race = detector(w)) {
    const u32 agent = race->agent(Race::kTmemStoreOf, *w.cta, w.index);
    race->join(race->warp(w), agent, race->now(agent));
  }
  return Status::kNext;
}
Status wait_load(Warp& w, const Instruction&) {
  w.require_converged("tcgen05.wait::ld");
  return Status::kNext;
}

// ---- shared memory ----

// tcgen05.cp: rows of 16 or 32 bytes into 4 or 8 columns, by the tensor core's pipe. x: address, descriptor.
// imm: rows, bytes of a row << 16, log2 of the copies of 32 lanes << 24 with warpx2::02_13 as 3 (CUTLASS's
// copy_traits_sm100.hpp). The rows lie as a K-major operand of bytes does.
Status copy(Warp& w, const Instruction& in) {
  Cta& cta = *w.cta;
  Race* race = detector(w);
  const u32 rows = in.imm & 0xFFFF, bytes = in.imm >> 16 & 255, kind = in.imm >> 24 & 3;
  for_lanes(w.mask, [&](u32 l) {
    const Operand source = blackwell_operand(row<u64>(w, in.x[3])[l], false, Element::kE4m3);
    const u64 to = address_at(w, in.x, l);
    const u32 column = static_cast<u32>(to) & 0xFFFF;
    if (to >> 16) fail("tcgen05.cp: the destination must start at lane 0");
    require_allocated(cta, column, bytes / 4, "tcgen05.cp");
    const u32 agent = race ? race->issue(Race::kTensorPipe, cta, 0, w) : 0;
    touch_operand(w, agent, source, rows, bytes, "tcgen05.cp");
    if (race) race->tmem(cta, agent, 15, column, bytes / 4, true, w.line);
    ++cta.machine->progress;
    cta.cluster->submit(cta.tensor, kTcgen05, 1u << l, [&cta, source, column, rows, bytes, kind] {
      for (u32 lane = 0; lane < kRows; ++lane) {
        const u32 quarter = lane / 32;
        const u32 of[] = {quarter, quarter / 2, 0, quarter & 1};  // 32 rows that a quarter gets
        const u32 r = of[kind] * 32 + lane % 32;
        for (u32 k = 0; k < bytes; k += 16)
          std::memcpy(&cta.tmem[size_t{lane} * kColumns + column + k / 4], &cta.shared[source.address(r, k)], 16);
      }
    });
  });
  return Status::kNext;
}

}  // namespace

void register_tensor_memory() {
  register_handler("tcgen05.alloc", alloc);
  register_handler("tcgen05.dealloc", dealloc);
  register_handler("tcgen05.relinquish", relinquish);
  register_handler("tcgen05.ld", load);
  register_handler("tcgen05.ld.red", load_reduced);
  register_handler("tcgen05.st", store);
  register_handler("tcgen05.wait::st", wait_store);
  register_handler("tcgen05.wait::ld", wait_load);
  register_handler("tcgen05.cp", copy);
}

}  // namespace ptxemu
