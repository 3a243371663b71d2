// tcgen05: tensor memory and its matrix multiplication (one CTA, dense, no block scales).
//
// Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. A warp reaches the 32 lanes
// of its quarter, index % 4.
#include "matrix.h"

namespace ptxemu {
namespace {

constexpr u32 kColumns = 512, kRows = 128;

Race* detector(Warp& w) { return w.cta->cluster->race.get(); }

void require_allocated(const Cta& cta, u32 column, u32 count, const char* what) {
  for (auto [first, size] : cta.tmem_allocations)
    if (column >= first && column + count <= first + size) return;
  fail("%s: columns %u to %u of tensor memory aren't allocated", what, column, column + count - 1);
}

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

// Lane and first column of a warp's access of `count` columns and 32 or 16 lanes.
std::pair<u32, u32> quarter(Warp& w, const i32* x, u32 count, const char* what, u32 lanes = 32) {
  w.require_converged(what);
  const Addresses a(w, x);
  for (u32 l = 1; l < kLanes; ++l)
    if (w.mask >> l & 1 && a[l] != a[0]) fail("%s: the address differs between lanes", what);
  const u32 lane = static_cast<u32>(a[0]) >> 16, column = static_cast<u32>(a[0]) & 0xFFFF;
  if (lane / 32 != w.index % 4 || lane % lanes)
    fail("%s: warp %u reaches lanes %u to %u only, not %u", what, w.index, 32 * (w.index % 4), 32 * (w.index % 4) + 31,
         lane);
  require_allocated(*w.cta, column, count, what);
  return {lane, column};
}

// Shape 32x32b: register j of lane l is column j of lane l. x: address, registers. imm: their number.
// Complete at issue: flash-attn-4's kernels have no tcgen05.wait::ld before they use the registers.
Status load(Warp& w, const Instruction& in) {
  const u32 n = static_cast<u32>(in.imm);
  const auto [lane, column] = quarter(w, in.x, n, "tcgen05.ld");
  if (Race* race = detector(w)) race->tmem(*w.cta, race->warp(w), 1u << (lane / 32), column, n, false, w.line);
  const u32* tmem = w.cta->tmem.data();
  for (u32 j = 0; j < n; ++j) {
    u32* d = row<u32>(w, in.x[3 + j]);
    for (u32 l = 0; l < kLanes; ++l) d[l] = tmem[(lane + l) * kColumns + column + j];
  }
  return Status::kNext;
}
// Shape 16x256b: 16 lanes of 8 columns a piece, as the accumulators of mma.sync m16n8 lie: register 4 i + 2 h + c of
// lane 4 g + t is column 8 i + 2 t + c of lane g + 8 h. x: address, registers. imm: their number.
Status load_fragments(Warp& w, const Instruction& in) {
  const u32 n = static_cast<u32>(in.imm);
  const auto [lane, column] = quarter(w, in.x, 2 * n, "tcgen05.ld", 16);
  if (Race* race = detector(w)) race->tmem(*w.cta, race->warp(w), 1u << (lane / 32), column, 2 * n, false, w.line);
  const u32* tmem = w.cta->tmem.data();
  for (u32 j = 0; j < n; ++j) {
    u32* d = row<u32>(w, in.x[3 + j]);
    for (u32 l = 0; l < kLanes; ++l)
      d[l] = tmem[(lane + l / 4 + (j >> 1 & 1) * 8) * kColumns + column + j / 4 * 8 + l % 4 * 2 + (j & 1)];
  }
  return Status::kNext;
}
// tcgen05.ld.red: also the minimum or maximum of a lane's columns. x: address, its register, registers.
// imm: their number, max << 16, abs << 17, NaN << 18.
Status load_reduced(Warp& w, const Instruction& in) {
  const u32 n = in.imm & 0xFFFF;
  const bool greatest = in.imm >> 16 & 1, absolute = in.imm >> 17 & 1, keep_nan = in.imm >> 18 & 1;
  const auto [lane, column] = quarter(w, in.x, n, "tcgen05.ld.red");
  if (Race* race = detector(w)) race->tmem(*w.cta, race->warp(w), 1u << (lane / 32), column, n, false, w.line);
  const u32* tmem = w.cta->tmem.data();
  float* best = row<float>(w, in.x[3]);
  for (u32 l = 0; l < kLanes; ++l) {
    float r = float_of(kNan);
    bool nan = false;
    for (u32 j = 0; j < n; ++j) {
      const u32 bits = tmem[(lane + l) * kColumns + column + j];
      row<u32>(w, in.x[4 + j])[l] = bits;
      const float v = absolute ? std::fabs(float_of(bits)) : float_of(bits);
      nan |= v != v;
      r = greatest ? std::fmax(r, v) : std::fmin(r, v);
    }
    best[l] = nan && keep_nan ? float_of(kNan) : r;
  }
  return Status::kNext;
}
Status store(Warp& w, const Instruction& in) {
  const u32 n = static_cast<u32>(in.imm);
  const auto [lane, column] = quarter(w, in.x, n, "tcgen05.st");
  std::vector<u32> data(size_t{n} * kLanes);
  for (u32 j = 0; j < n; ++j)
    for (u32 l = 0; l < kLanes; ++l) data[l * n + j] = row<u32>(w, in.x[3 + j])[l];
  if (Race* race = detector(w)) {
    const u32 agent = race->issue(Race::kTmemStoreOf, *w.cta, w.index, w);
    race->tmem(*w.cta, agent, 1u << (lane / 32), column, n, true, w.line);
  }
  Cta* cta = w.cta;
  ++cta->machine->progress;
  cta->cluster->submit(w.tmem_stores, kTmemStore, w.mask,
                       [cta, data = std::move(data), lane = lane, column = column, n] {
                         for (u32 l = 0; l < kLanes; ++l)
                           std::memcpy(&cta->tmem[(lane + l) * kColumns + column], &data[l * n], 4 * n);
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

// ---- mma ----

struct Product {
  u32 m, n, k, d;
  Element a_type, b_type;
  bool a_in_tmem, a_mn, b_mn, a_negated, b_negated, use_d;
  u64 a, b;

  // The lane of a row: with M = 64, 16 rows lie in each quarter. (No upstream kernel witnesses M = 64.)
  u32 lane(u32 r) const { return m == 128 ? r : r / 16 * 32 + r % 16; }
  u32 a_columns() const { return k * static_cast<u32>(size_of(a_type)) / 4; }
};

// The instruction descriptor: bits 4-5 D's type (1 float), 7-9 and 10-12 A's and B's, 13 and 14 negate, 15 and 16
// MN-major, 17-22 N / 8, 24-28 M / 16; the others must be 0 here.
Product described(u32 idesc, bool f16_kind) {
  if ((idesc & 0x6080004F) != 0 || (idesc >> 4 & 3) != 1) fail("instruction descriptor %#x isn't implemented", idesc);
  const auto type = [&](u32 code) {
    if (code > 1) fail("instruction descriptor %#x: element type %u isn't implemented", idesc, code);
    return f16_kind ? (code ? Element::kBf16 : Element::kF16) : (code ? Element::kE5m2 : Element::kE4m3);
  };
  Product p{};
  p.m = (idesc >> 24 & 31) * 16, p.n = (idesc >> 17 & 63) * 8, p.k = f16_kind ? 16 : 32;
  p.a_type = type(idesc >> 7 & 7), p.b_type = type(idesc >> 10 & 7);
  p.a_negated = idesc >> 13 & 1, p.b_negated = idesc >> 14 & 1, p.a_mn = idesc >> 15 & 1, p.b_mn = idesc >> 16 & 1;
  if ((p.m != 64 && p.m != 128) || p.n == 0 || p.n > 256 || p.n % (p.m == 64 ? 8 : 16))
    fail("instruction descriptor %#x: M %u, N %u", idesc, p.m, p.n);
  return p;
}

void run(Cta& cta, const Product& p) {
  std::vector<float> a(size_t{p.m} * p.k), b(size_t{p.n} * p.k), bt(size_t{p.n} * p.k);
  if (p.a_in_tmem) {
    for (u32 r = 0; r < p.m; ++r)
      widen(p.a_type, reinterpret_cast<const u8*>(&cta.tmem[p.lane(r) * kColumns + (p.a & 0xFFFF)]), &a[r * p.k],
            static_cast<int>(p.k));
  } else {
    read_operand(cta, blackwell_operand(p.a, p.a_mn, p.a_type), 0, p.m, p.k, a.data());
  }
  read_operand(cta, blackwell_operand(p.b, p.b_mn, p.b_type), 0, p.n, p.k, b.data());
  const float sign = p.a_negated != p.b_negated ? -1.0f : 1.0f;
  for (u32 j = 0; j < p.n; ++j)
    for (u32 x = 0; x < p.k; ++x) bt[x * p.n + j] = sign * b[j * p.k + x];
  float* tmem = reinterpret_cast<float*>(cta.tmem.data());
  for (u32 r = 0; r < p.m; r += 16) {  // 16 rows are neighbours whatever M is
    float* d = tmem + size_t{p.lane(r)} * kColumns + p.d;
    if (!p.use_d)
      for (u32 i = 0; i < 16; ++i) std::fill_n(d + i * kColumns, p.n, 0.0f);
    multiply(&a[r * p.k], bt.data(), d, 16, p.n, p.k, kColumns);
  }
  ++cta.machine->spec->matrix_instructions;
}

// x: address of D, A (an address in tensor memory, or a row with a descriptor, then -, -), B's descriptor, the
// instruction descriptor, enable-input-d. imm: bit 0 kind::f16, bit 1 A in tensor memory.
Status mma(Warp& w, const Instruction& in) {
  Cta& cta = *w.cta;
  Race* race = detector(w);
  for_lanes(w.mask, [&](u32 l) {
    Product p = described(row<u32>(w, in.x[7])[l], in.imm & 1);
    p.a_in_tmem = in.imm >> 1 & 1;
    p.a = p.a_in_tmem ? address_at(w, in.x + 3, l) : row<u64>(w, in.x[3])[l];
    p.b = row<u64>(w, in.x[6])[l];
    p.use_d = predicate(w, in.x[8]) >> l & 1;
    const u64 d = address_at(w, in.x, l);
    p.d = static_cast<u32>(d) & 0xFFFF;
    if (d >> 16 || (p.a_in_tmem && p.a >> 16)) fail("tcgen05.mma: an operand in tensor memory must start at lane 0");
    require_allocated(cta, p.d, p.n, "tcgen05.mma");
    if (p.a_in_tmem) require_allocated(cta, static_cast<u32>(p.a), p.a_columns(), "tcgen05.mma");
    const u32 agent = race ? race->issue(Race::kTensorPipe, cta, 0, w) : 0;
    const auto touch = [&](const Operand& o, u32 rows) {
      for (u32 at : o.granules(0, rows, p.k)) {
        if (at + 16 > cta.shared.size()) fail("tcgen05.mma: an operand reaches outside shared memory");
        check_proxy(cta, at, 16, "tcgen05.mma", w.line);
        if (race) race->shared(cta, agent, at, 16, false, w.line);
      }
    };
    if (!p.a_in_tmem) touch(blackwell_operand(p.a, p.a_mn, p.a_type), p.m);
    touch(blackwell_operand(p.b, p.b_mn, p.b_type), p.n);
    if (race) {
      if (p.a_in_tmem) race->tmem(cta, agent, 15, static_cast<u32>(p.a), p.a_columns(), false, w.line);
      if (p.use_d) race->tmem(cta, agent, 15, p.d, p.n, false, w.line);
      race->tmem(cta, agent, 15, p.d, p.n, true, w.line);
    }
    ++cta.machine->progress;
    cta.cluster->submit(cta.tensor, kTcgen05, 1u << l, [&cta, p] { run(cta, p); });
  });
  return Status::kNext;
}

// One arrival once all earlier operations of the pipe are done. x: mbarrier, multicast mask (-1).
Status commit(Warp& w, const Instruction& in) {
  Cta& cta = *w.cta;
  Race* race = detector(w);
  for_lanes(w.mask, [&](u32 l) {
    const u32 address = static_cast<u32>(address_at(w, in.x, l)), low = (1u << kRankShift) - 1;
    std::vector<u32> bars;
    if (in.x[3] < 0)
      bars.push_back(address);
    else
      for_lanes(row<u16>(w, in.x[3])[l], [&](u32 r) { bars.push_back(r << kRankShift | (address & low)); });
    for (u32 bar : bars) cta.cluster->owner(bar).mbarrier(bar);
    Clock clock;
    if (race) clock = race->snapshot(race->agent(Race::kTensorPipe, cta, 0));
    // No lanes: a commit touches no memory, so it may be in flight when tensor memory is freed.
    cta.cluster->submit(cta.tensor, kTcgen05, 0, [&cta, race, clock, bars] {
      for (u32 bar : bars) {
        Cta& owner = cta.cluster->owner(bar);
        if (race) race->release(Race::mbarrier_object(owner, bar & 0xFFFFFF), clock);
        owner.arrive(bar, 1, 0);
      }
    });
  });
  return Status::kNext;
}

}  // namespace

void register_tcgen05() {
  register_handler("tcgen05.alloc", alloc);
  register_handler("tcgen05.dealloc", dealloc);
  register_handler("tcgen05.relinquish", relinquish);
  register_handler("tcgen05.ld", load);
  register_handler("tcgen05.ld.16x256b", load_fragments);
  register_handler("tcgen05.ld.red", load_reduced);
  register_handler("tcgen05.st", store);
  register_handler("tcgen05.wait::st", wait_store);
  register_handler("tcgen05.wait::ld", wait_load);
  register_handler("tcgen05.mma", mma);
  register_handler("tcgen05.commit", commit);
}

}  // namespace ptxemu
