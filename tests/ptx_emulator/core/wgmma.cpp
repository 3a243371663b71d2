// wgmma: each of the four warps of a warpgroup computes its 16 rows.
#include "matrix.h"

namespace ptxemu {
namespace {

struct Wgmma {
  u32 n, k;
  Element a, b;
  bool a_in_registers, a_mn, b_mn, a_negated, b_negated, use_d;
  u64 a_descriptor, b_descriptor;
  const i32 *xd, *xa;
};

// D's register 4i + 2h + c of lane l: row l / 4 + 8h, column 8i + 2 (l % 4) + c.
void run(Warp& w, const Wgmma& g) {
  std::vector<float> a(16 * g.k), b(g.n * g.k), bt(g.n * g.k), d(16 * g.n, 0.0f);
  const u32 per = 4 / static_cast<u32>(size_of(g.a));
  if (g.a_in_registers) {
    for (u32 i = 0; i < 4; ++i)
      for (u32 l = 0; l < kLanes; ++l)
        widen(g.a, row<u8>(w, g.xa[i]) + 4 * l,
              a.data() + (l / 4 + 8 * (i & 1)) * g.k + (l % 4) * per + (i >> 1) * 4 * per, static_cast<int>(per));
  } else {
    read_operand(*w.cta, hopper_operand(g.a_descriptor, g.a_mn, g.a), 16 * (w.index % 4), 16, g.k, a.data());
  }
  read_operand(*w.cta, hopper_operand(g.b_descriptor, g.b_mn, g.b), 0, g.n, g.k, b.data());
  const float sign = g.a_negated != g.b_negated ? -1.0f : 1.0f;
  for (u32 j = 0; j < g.n; ++j)
    for (u32 x = 0; x < g.k; ++x) bt[x * g.n + j] = sign * b[j * g.k + x];
  const auto place = [&](u32 r, u32 l) {
    return (l / 4 + 8 * (r >> 1 & 1)) * g.n + 8 * (r / 4) + 2 * (l % 4) + (r & 1);
  };
  if (g.use_d)
    for (u32 r = 0; r < g.n / 2; ++r)
      for (u32 l = 0; l < kLanes; ++l) d[place(r, l)] = row<float>(w, g.xd[r])[l];
  multiply(a.data(), bt.data(), d.data(), 16, g.n, g.k, g.n);
  for (u32 r = 0; r < g.n / 2; ++r)
    for (u32 l = 0; l < kLanes; ++l) row<float>(w, g.xd[r])[l] = d[place(r, l)];
  ++w.cta->machine->spec->matrix_instructions;
}

// x: scale-d (predicate), A descriptor or its 4 registers, B descriptor, then N / 2 registers of D.
// imm: N, k << 16, Element of A << 24, of B << 28, then from bit 32: A in registers, A MN-major, B MN-major, A, B
// negated.
Status wgmma(Warp& w, const Instruction& in) {
  w.require_converged("wgmma");
  Wgmma g;
  g.n = in.imm & 0xFFFF, g.k = in.imm >> 16 & 255;
  g.a = static_cast<Element>(in.imm >> 24 & 15), g.b = static_cast<Element>(in.imm >> 28 & 15);
  const auto flag = [&](int i) { return in.imm >> (32 + i) & 1; };
  g.a_in_registers = flag(0), g.a_mn = flag(1), g.b_mn = flag(2), g.a_negated = flag(3), g.b_negated = flag(4);
  const u32 p = predicate(w, in.x[0]) & w.mask;
  if (p != 0 && p != w.mask) fail("wgmma: scale-d differs between lanes");
  g.use_d = p != 0;
  const i32* x = in.x + 1;
  g.xa = x;
  g.a_descriptor = g.a_in_registers ? 0 : uniform<u64>(w, *x, "wgmma descriptor of A");
  x += g.a_in_registers ? 4 : 1;
  g.b_descriptor = uniform<u64>(w, *x++, "wgmma descriptor of B");
  g.xd = x;
  Race* race = w.cta->cluster->race.get();
  const u32 agent = race ? race->issue(Race::kWgmmaOf, *w.cta, w.index, w) : 0;
  const auto touch = [&](const Operand& o, u32 first, u32 rows) {
    for (u32 at : o.granules(first, rows, g.k)) {
      if (at + 16 > w.cta->shared.size()) fail("wgmma: an operand reaches outside shared memory");
      check_proxy(*w.cta, at, 16, "wgmma", w.line);
      if (race) race->shared(*w.cta, agent, at, 16, false, w.line);
    }
  };
  if (!g.a_in_registers) touch(hopper_operand(g.a_descriptor, g.a_mn, g.a), 16 * (w.index % 4), 16);
  touch(hopper_operand(g.b_descriptor, g.b_mn, g.b), 0, g.n);
  w.cta->cluster->submit(w.wgmma.open, kWgmma, w.mask, [&w, g] { run(w, g); });
  return Status::kNext;
}
Status commit(Warp& w, const Instruction&) {
  w.require_converged("wgmma.commit_group");
  group_commit(w, w.wgmma, Race::kWgmmaOf);
  return Status::kNext;
}
Status wait(Warp& w, const Instruction& in) {
  w.require_converged("wgmma.wait_group");
  group_wait(w, w.wgmma, Race::kWgmmaOf, static_cast<u32>(in.imm));
  return Status::kNext;
}

}  // namespace

void register_wgmma() {
  register_handler("wgmma", wgmma);
  register_handler("wgmma.commit", commit);
  register_handler("wgmma.wait", wait);
}

}  // namespace ptxemu
