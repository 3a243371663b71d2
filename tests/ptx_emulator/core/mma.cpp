// mma.sync, and what wgmma and tcgen05.mma share with it. Products are exact in float (their inputs have at most 11
// significant bits); sums are rounded after every addition, in the order of k. Hardware aligns and truncates instead,
// so results agree with it to a few ulps, and exactly where all sums are exact.
#include <algorithm>

#include "matrix.h"

namespace ptxemu {

std::vector<u32> Operand::granules(u32 first, u32 rows, u32 k) const {
  std::vector<u32> out;
  const u32 t = 16 / static_cast<u32>(size_of(element));
  if (mn_major)
    for (u32 i = 0; i < k; ++i)
      for (u32 r = first; r < first + rows; r += t) out.push_back(address(r, i));
  else
    for (u32 r = first; r < first + rows; ++r)
      for (u32 i = 0; i < k; i += t) out.push_back(address(r, i));
  return out;
}

// Fields of 14 bits hold bytes / 16.
static u32 field(u64 descriptor, u32 bit) { return static_cast<u32>(descriptor >> bit & 0x3FFF) << 4; }

Operand hopper_operand(u64 d, bool mn_major, Element element) {
  static constexpr u32 spans[] = {0, 128, 64, 32};
  if (d >> 49 & 7) fail("matrix descriptor %#llx: a base offset isn't implemented", (unsigned long long)d);
  return {field(d, 0), field(d, 16), field(d, 32), spans[d >> 62], mn_major, element};
}

Operand blackwell_operand(u64 d, bool mn_major, Element element) {
  const auto bad = [&](const char* what) { fail("matrix descriptor %#llx: %s", (unsigned long long)d, what); };
  if ((d >> 46 & 3) != 1) bad("bits 46 and 47 must hold version 1");
  if (d >> 49 & 7) bad("a base offset isn't implemented");
  if (d >> 52 & 1) bad("the absolute leading dimension mode isn't implemented");
  u32 span = 0;
  switch (d >> 61) {
    case 0:
      break;
    case 2:
      span = 128;
      break;
    case 4:
      span = 64;
      break;
    case 6:
      span = 32;
      break;
    default:
      bad("the swizzle mode isn't implemented");
  }
  return {field(d, 0), field(d, 16), field(d, 32), span, mn_major, element};
}

void read_operand(Cta& cta, const Operand& o, u32 first, u32 rows, u32 k, float* to) {
  const u32 size = static_cast<u32>(size_of(o.element));
  const u8* shared = cta.shared.data();
  // Addresses in a descriptor have 18 bits and no rank: they are the CTA's own.
  const u32 most = static_cast<u32>(cta.shared.size());
  const auto check = [&](u32 at, u32 bytes) {
    if (at < kReservedShared || at + bytes > most) fail("a matrix operand reaches outside shared memory, at %#x", at);
  };
  if (!o.mn_major) {
    const u32 t = 16 / size;
    for (u32 r = first; r < first + rows; ++r)
      for (u32 i = 0; i < k; i += t) {
        const u32 at = o.address(r, i);
        const u32 n = std::min(t, k - i);
        check(at, n * size);
        widen(o.element, shared + at, to + (r - first) * k + i, static_cast<int>(n));
      }
  } else {
    const u32 t = 16 / size;
    float line[16];
    for (u32 i = 0; i < k; ++i)
      for (u32 r = first; r < first + rows; r += t) {
        const u32 at = o.address(r, i);
        const u32 n = std::min(t, first + rows - r);
        check(at, n * size);
        widen(o.element, shared + at, line, static_cast<int>(n));
        for (u32 j = 0; j < n; ++j) to[(r - first + j) * k + i] = line[j];
      }
  }
}

void multiply(const float* a, const float* bt, float* d, u32 m, u32 n, u32 k, u32 pitch) {
  for (u32 i = 0; i < m; ++i) {
    float* row_d = d + size_t{i} * pitch;
    for (u32 x = 0; x < k; ++x) {
      const float v = a[size_t{i} * k + x];
      const float* row_b = bt + size_t{x} * n;
#pragma GCC ivdep
      for (u32 j = 0; j < n; ++j) row_d[j] = __builtin_fmaf(v, row_b[j], row_d[j]);
    }
  }
}

namespace {

// m16n8k(32 bytes of A a row). Lane l = 4g + t. A's register i holds row g + 8 (i & 1), bytes 4t + 16 (i >> 1) on; B's
// register i column g, bytes 4t + 16 i on; C and D: row g + 8 (i >> 1), column 2t + (i & 1).
// x: d[4], a[4 or 2], b[2 or 1], c[4]. imm: Element of A, of B << 8, bytes of K (32 or 16) << 16.
Status mma(Warp& w, const Instruction& in) {
  w.require_converged("mma.sync");
  const Element ea = static_cast<Element>(in.imm & 255), eb = static_cast<Element>(in.imm >> 8 & 255);
  const u32 bytes = in.imm >> 16 & 255, size = static_cast<u32>(size_of(ea)), per = 4 / size, k = bytes / size;
  const u32 halves = bytes / 16;
  const i32 *xd = in.x, *xa = xd + 4, *xb = xa + 2 * halves, *xc = xb + halves;
  float a[16 * 32], bt[32 * 8], d[16 * 8];
  for (u32 i = 0; i < 2 * halves; ++i) {
    const u8* r = row<u8>(w, xa[i]);
    for (u32 l = 0; l < kLanes; ++l)
      widen(ea, r + 4 * l, a + (l / 4 + 8 * (i & 1)) * k + (l % 4) * per + (i >> 1) * 4 * per, static_cast<int>(per));
  }
  for (u32 i = 0; i < halves; ++i) {
    const u8* r = row<u8>(w, xb[i]);
    for (u32 l = 0; l < kLanes; ++l) {
      float v[4];
      widen(eb, r + 4 * l, v, static_cast<int>(per));
      for (u32 j = 0; j < per; ++j) bt[((l % 4) * per + i * 4 * per + j) * 8 + l / 4] = v[j];
    }
  }
  for (u32 i = 0; i < 4; ++i) {
    const float* r = row<float>(w, xc[i]);
    for (u32 l = 0; l < kLanes; ++l) d[(l / 4 + 8 * (i >> 1)) * 8 + 2 * (l % 4) + (i & 1)] = r[l];
  }
  multiply(a, bt, d, 16, 8, k, 8);
  for (u32 i = 0; i < 4; ++i) {
    float* r = row<float>(w, xd[i]);
    for (u32 l = 0; l < kLanes; ++l) r[l] = d[(l / 4 + 8 * (i >> 1)) * 8 + 2 * (l % 4) + (i & 1)];
  }
  ++w.cta->machine->spec->matrix_instructions;
  return Status::kNext;
}

}  // namespace

void register_mma() { register_handler("mma", mma); }

}  // namespace ptxemu
