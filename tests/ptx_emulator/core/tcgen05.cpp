// tcgen05: matrix multiplication (one CTA, dense, no block scales) and commit.
#include "tensor_memory.h"

namespace ptxemu {
namespace {

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
    if (!p.a_in_tmem) touch_operand(w, agent, blackwell_operand(p.a, p.a_mn, p.a_type), p.m, p.k, "tcgen05.mma");
    touch_operand(w, agent, blackwell_operand(p.b, p.b_mn, p.b_type), p.n, p.k, "tcgen05.mma");
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
  register_handler("tcgen05.mma", mma);
  register_handler("tcgen05.commit", commit);
}

}  // namespace ptxemu
