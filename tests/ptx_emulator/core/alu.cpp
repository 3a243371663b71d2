// Integer and logical instructions, moves, comparisons and selections.
#include <limits>
#include <type_traits>

#include "core.h"

namespace ptxemu {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

#define BINARY(NAME, EXPRESSION)                                                   \
  template <class T>                                                               \
  Status NAME(Warp& w, const Instruction& in) {                                    \
    const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);                      \
    return each<T>(w, in.x[0], [=](u32 l) { return static_cast<T>(EXPRESSION); }); \
  }
BINARY(add, Unsigned<T>(a[l]) + Unsigned<T>(b[l]))
BINARY(sub, Unsigned<T>(a[l]) - Unsigned<T>(b[l]))
BINARY(mul_lo, u64(a[l]) * u64(b[l]))
BINARY(bit_and, a[l] & b[l])
BINARY(bit_or, a[l] | b[l])
BINARY(bit_xor, a[l] ^ b[l])
BINARY(minimum, a[l] < b[l] ? a[l] : b[l])
BINARY(maximum, a[l] > b[l] ? a[l] : b[l])
// The manual leaves division by zero to the machine, which gives all ones (and the dividend as remainder).
BINARY(divide, b[l] == 0                              ? T(~T(0))
               : std::is_signed_v<T> && b[l] == T(-1) ? T(Unsigned<T>(0) - Unsigned<T>(a[l]))
                                                      : T(a[l] / b[l]))
BINARY(remainder, b[l] == 0 ? a[l] : std::is_signed_v<T> && b[l] == T(-1) ? T(0) : T(a[l] % b[l]))
#undef BINARY

template <class T>
Status relu_max(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  return each<T>(w, in.x[0], [=](u32 l) { return std::max(T(0), std::max(a[l], b[l])); });
}
template <class T>
Status relu_min(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  return each<T>(w, in.x[0], [=](u32 l) { return std::max(T(0), std::min(a[l], b[l])); });
}

template <class T>
struct Wider;
template <>
struct Wider<i16> {
  using type = i32;
};
template <>
struct Wider<u16> {
  using type = u32;
};
template <>
struct Wider<i32> {
  using type = i64;
};
template <>
struct Wider<u32> {
  using type = u64;
};
template <>
struct Wider<i64> {
  using type = __int128;
};
template <>
struct Wider<u64> {
  using type = unsigned __int128;
};
template <class T>
using Wide = typename Wider<T>::type;

template <class T>
Status mul_hi(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  return each<T>(w, in.x[0], [=](u32 l) { return static_cast<T>(Wide<T>(a[l]) * b[l] >> (8 * sizeof(T))); });
}
template <class T>
Status mul_wide(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  return each<Wide<T>>(w, in.x[0], [=](u32 l) { return Wide<T>(a[l]) * b[l]; });
}
template <class T>
Status mad_lo(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]), *c = row<T>(w, in.x[3]);
  return each<T>(w, in.x[0], [=](u32 l) { return static_cast<T>(u64(a[l]) * u64(b[l]) + u64(c[l])); });
}
template <class T>
Status mad_hi(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]), *c = row<T>(w, in.x[3]);
  return each<T>(w, in.x[0], [=](u32 l) {
    return static_cast<T>(Unsigned<T>(Wide<T>(a[l]) * b[l] >> (8 * sizeof(T))) + Unsigned<T>(c[l]));
  });
}
template <class T>
Status mad_wide(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  const Wide<T>* c = row<Wide<T>>(w, in.x[3]);
  return each<Wide<T>>(w, in.x[0], [=](u32 l) { return static_cast<Wide<T>>(u64(Wide<T>(a[l]) * b[l]) + u64(c[l])); });
}

#define UNARY(NAME, RESULT, EXPRESSION)                                                      \
  template <class T>                                                                         \
  Status NAME(Warp& w, const Instruction& in) {                                              \
    const T* a = row<T>(w, in.x[1]);                                                         \
    return each<RESULT>(w, in.x[0], [=](u32 l) { return static_cast<RESULT>(EXPRESSION); }); \
  }
UNARY(negate, T, Unsigned<T>(0) - Unsigned<T>(a[l]))
UNARY(absolute, T, a[l] < 0 ? Unsigned<T>(0) - Unsigned<T>(a[l]) : Unsigned<T>(a[l]))
UNARY(bit_not, T, ~a[l])
UNARY(move, T, a[l])
UNARY(popc, u32, __builtin_popcountll(a[l]))
UNARY(clz, u32, a[l] == 0 ? 8 * sizeof(T) : static_cast<size_t>(__builtin_clzll(a[l])) - (64 - 8 * sizeof(T)))
#undef UNARY

template <class T>
Status brev(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  return each<T>(w, in.x[0], [=](u32 l) {
    T r = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) r |= (a[l] >> i & 1) << (8 * sizeof(T) - 1 - i);
    return r;
  });
}
// imm: shift amount wanted instead of the position
template <class T>
Status bfind(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  constexpr int bits = 8 * sizeof(T);
  return each<u32>(w, in.x[0], [=, &in](u32 l) {
    u64 v = static_cast<Unsigned<T>>(std::is_signed_v<T> && a[l] < 0 ? ~a[l] : a[l]);
    if (v == 0) return kFull;
    const u32 at = 63u - static_cast<u32>(__builtin_clzll(v));
    return in.imm ? bits - 1 - at : at;
  });
}

// Amounts beyond the width give 0, or the sign.
template <class T>
Status shl(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  const u32* b = row<u32>(w, in.x[2]);
  return each<T>(w, in.x[0], [=](u32 l) { return b[l] >= 8 * sizeof(T) ? T(0) : static_cast<T>(u64(a[l]) << b[l]); });
}
template <class T>
Status shr(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  const u32* b = row<u32>(w, in.x[2]);
  constexpr u32 most = 8 * sizeof(T) - 1;
  return each<T>(w, in.x[0], [=](u32 l) {
    return b[l] > most ? static_cast<T>(std::is_signed_v<T> ? a[l] >> most : 0) : static_cast<T>(a[l] >> b[l]);
  });
}
// imm: bit 0 right, bit 1 clamp
Status funnel_shift(Warp& w, const Instruction& in) {
  const u32 *lo = row<u32>(w, in.x[1]), *hi = row<u32>(w, in.x[2]), *n = row<u32>(w, in.x[3]);
  const bool right = in.imm & 1, clamp = in.imm & 2;
  return each<u32>(w, in.x[0], [=](u32 l) {
    const u64 v = u64{hi[l]} << 32 | lo[l];
    const u32 k = clamp ? std::min(n[l], 32u) : n[l] & 31;
    return static_cast<u32>(right ? v >> k : v << k >> 32);
  });
}
template <class T>
Status bfe(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  const u32 *p = row<u32>(w, in.x[2]), *n = row<u32>(w, in.x[3]);
  constexpr u32 bits = 8 * sizeof(T);
  return each<T>(w, in.x[0], [=](u32 l) {
    const u32 pos = p[l] & 255, length = n[l] & 255;
    if (length == 0) return T(0);
    const bool negative = std::is_signed_v<T> && (a[l] >> std::min(pos + length - 1, bits - 1) & 1);
    u64 v = pos >= bits ? 0 : static_cast<u64>(static_cast<Unsigned<T>>(a[l])) >> pos;
    const u32 have = pos >= bits ? 0 : std::min(length, bits - pos);
    v &= have >= 64 ? ~u64{0} : (u64{1} << have) - 1;
    if (negative && have < 64) v |= ~u64{0} << have;
    return static_cast<T>(v);
  });
}
template <class T>
Status bfi(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  const u32 *p = row<u32>(w, in.x[3]), *n = row<u32>(w, in.x[4]);
  constexpr u32 bits = 8 * sizeof(T);
  return each<T>(w, in.x[0], [=](u32 l) {
    const u32 pos = p[l] & 255, length = n[l] & 255;
    if (pos >= bits || length == 0) return b[l];
    const u64 field = (length >= bits ? ~u64{0} : (u64{1} << length) - 1) << pos;
    return static_cast<T>((u64(a[l]) << pos & field) | (u64(b[l]) & ~field));
  });
}
// imm: the truth table
Status lop3(Warp& w, const Instruction& in) {
  const u32 *a = row<u32>(w, in.x[1]), *b = row<u32>(w, in.x[2]), *c = row<u32>(w, in.x[3]);
  const u32 t = static_cast<u32>(in.imm);
  u32 pick[8];
  for (u32 i = 0; i < 8; ++i) pick[i] = t >> i & 1 ? kFull : 0;
  return each<u32>(w, in.x[0], [=](u32 l) {
    u32 r = 0;
    for (u32 i = 0; i < 8; ++i) r |= (i & 4 ? a[l] : ~a[l]) & (i & 2 ? b[l] : ~b[l]) & (i & 1 ? c[l] : ~c[l]) & pick[i];
    return r;
  });
}
Status prmt(Warp& w, const Instruction& in) {
  const u32 *a = row<u32>(w, in.x[1]), *b = row<u32>(w, in.x[2]), *s = row<u32>(w, in.x[3]);
  return each<u32>(w, in.x[0], [=](u32 l) {
    const u64 v = u64{b[l]} << 32 | a[l];
    u32 r = 0;
    for (u32 i = 0; i < 4; ++i) {
      const u32 selector = s[l] >> (4 * i) & 15;
      u32 byte = static_cast<u32>(v >> (8 * (selector & 7))) & 255;
      if (selector & 8) byte = byte & 128 ? 255 : 0;
      r |= byte << (8 * i);
    }
    return r;
  });
}

// ---- predicates ----

Status and_pred(Warp& w, const Instruction& in) {
  const u32 v = predicate(w, in.x[1]) & predicate(w, in.x[2]);
  return each_predicate(w, in.x[0], [=](u32 l) { return v >> l & 1; });
}
Status or_pred(Warp& w, const Instruction& in) {
  const u32 v = predicate(w, in.x[1]) | predicate(w, in.x[2]);
  return each_predicate(w, in.x[0], [=](u32 l) { return v >> l & 1; });
}
Status xor_pred(Warp& w, const Instruction& in) {
  const u32 v = predicate(w, in.x[1]) ^ predicate(w, in.x[2]);
  return each_predicate(w, in.x[0], [=](u32 l) { return v >> l & 1; });
}
Status not_pred(Warp& w, const Instruction& in) {
  const u32 v = ~predicate(w, in.x[1]);
  return each_predicate(w, in.x[0], [=](u32 l) { return v >> l & 1; });
}
Status mov_pred(Warp& w, const Instruction& in) {
  const u32 v = predicate(w, in.x[1]);
  return each_predicate(w, in.x[0], [=](u32 l) { return v >> l & 1; });
}
template <class T>
Status selp(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[1]), *b = row<T>(w, in.x[2]);
  const u32 p = predicate(w, in.x[3]);
  return each<T>(w, in.x[0], [=](u32 l) { return p >> l & 1 ? a[l] : b[l]; });
}

enum Compare { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan };

// x: p, q (or a scratch predicate), a, b, c. imm: bits 0-1 combine (1 and, 2 or, 3 xor), bit 2 c is negated,
// bit 3 the result is also true if unordered, bit 4 flush subnormal operands.
template <class T, Compare C>
Status setp(Warp& w, const Instruction& in) {
  const T *a = row<T>(w, in.x[2]), *b = row<T>(w, in.x[3]);
  const bool unordered = in.imm & 8, flush = in.imm & 16;
  u32 bits = 0;
  for (u32 l = 0; l < kLanes; ++l) {
    T x = a[l], y = b[l];
    bool r = false;
    if constexpr (std::is_floating_point_v<T>) {
      if (flush && std::abs(x) < std::numeric_limits<T>::min()) x = 0;
      if (flush && std::abs(y) < std::numeric_limits<T>::min()) y = 0;
      const bool nan = x != x || y != y;
      if (C == kNum)
        r = !nan;
      else if (C == kNan)
        r = nan;
      else if (nan)
        r = unordered;
      else
        r = C == kEq ? x == y : C == kNe ? x != y : C == kLt ? x < y : C == kLe ? x <= y : C == kGt ? x > y : x >= y;
    } else {
      r = C == kEq ? x == y : C == kNe ? x != y : C == kLt ? x < y : C == kLe ? x <= y : C == kGt ? x > y : x >= y;
    }
    bits |= static_cast<u32>(r) << l;
  }
  u32 c = predicate(w, in.x[4]);
  if (in.imm & 4) c = ~c;
  const auto combined = [&](u32 v) {
    switch (in.imm & 3) {
      case 1:
        return v & c;
      case 2:
        return v | c;
      case 3:
        return v ^ c;
    }
    return v;
  };
  const u32 first = combined(bits), second = combined(~bits);
  u32 &p = predicate(w, in.x[0]), &q = predicate(w, in.x[1]);
  q = (q & ~w.mask) | (second & w.mask);
  p = (p & ~w.mask) | (first & w.mask);
  return Status::kNext;
}

template <class T>
void register_setp(const std::string& type) {
  register_handler("setp.eq." + type, setp<T, kEq>);
  register_handler("setp.ne." + type, setp<T, kNe>);
  register_handler("setp.lt." + type, setp<T, kLt>);
  register_handler("setp.le." + type, setp<T, kLe>);
  register_handler("setp.gt." + type, setp<T, kGt>);
  register_handler("setp.ge." + type, setp<T, kGe>);
  register_handler("setp.num." + type, setp<T, kNum>);
  register_handler("setp.nan." + type, setp<T, kNan>);
}

// ---- packing ----

// x: d, parts; imm: number of parts
template <class D, class P>
Status pack(Warp& w, const Instruction& in) {
  D value[kLanes] = {};
  for (i64 i = 0; i < in.imm; ++i) {
    const P* p = row<P>(w, in.x[1 + i]);
    for (u32 l = 0; l < kLanes; ++l) value[l] |= static_cast<D>(D{p[l]} << (8 * sizeof(P) * static_cast<size_t>(i)));
  }
  return each<D>(w, in.x[0], [&](u32 l) { return value[l]; });
}
// x: parts (negative: not wanted), source
template <class D, class P>
Status unpack(Warp& w, const Instruction& in) {
  D value[kLanes];
  std::memcpy(value, row<D>(w, in.x[in.imm]), sizeof value);
  for (i64 i = 0; i < in.imm; ++i)
    if (in.x[i] >= 0)
      each<P>(w, in.x[i], [&](u32 l) { return static_cast<P>(value[l] >> (8 * sizeof(P) * static_cast<size_t>(i))); });
  return Status::kNext;
}

Status clock(Warp& w, const Instruction& in) {
  const u64 now = w.cta->machine->spec->instructions + w.instructions;
  return in.imm == 64 ? each<u64>(w, in.x[0], [=](u32) { return now; })
                      : each<u32>(w, in.x[0], [=](u32) { return static_cast<u32>(now); });
}

template <class T>
void register_integer(const std::string& type) {
  register_handler("add." + type, add<T>);
  register_handler("sub." + type, sub<T>);
  register_handler("mul.lo." + type, mul_lo<T>);
  register_handler("mul.hi." + type, mul_hi<T>);
  register_handler("mad.lo." + type, mad_lo<T>);
  register_handler("mad.hi." + type, mad_hi<T>);
  register_handler("div." + type, divide<T>);
  register_handler("rem." + type, remainder<T>);
  register_handler("min." + type, minimum<T>);
  register_handler("max." + type, maximum<T>);
  register_handler("neg." + type, negate<T>);
  register_handler("abs." + type, absolute<T>);
  register_handler("shr." + type, shr<T>);
  register_handler("bfe." + type, bfe<T>);
  register_handler("bfind." + type, bfind<T>);
  register_setp<T>(type);
}
template <class T>
void register_bits(const std::string& type) {
  register_handler("and." + type, bit_and<T>);
  register_handler("or." + type, bit_or<T>);
  register_handler("xor." + type, bit_xor<T>);
  register_handler("not." + type, bit_not<T>);
  register_handler("shl." + type, shl<T>);
  register_handler("shr." + type, shr<T>);
  register_handler("mov." + type, move<T>);
  register_handler("selp." + type, selp<T>);
  register_handler("brev." + type, brev<T>);
  register_handler("popc." + type, popc<T>);
  register_handler("clz." + type, clz<T>);
  register_handler("bfi." + type, bfi<T>);
  register_setp<T>(type);
}

}  // namespace

void register_alu() {
  register_integer<i16>("s16");
  register_integer<u16>("u16");
  register_integer<i32>("s32");
  register_integer<u32>("u32");
  register_integer<i64>("s64");
  register_integer<u64>("u64");
  register_bits<u16>("b16");
  register_bits<u32>("b32");
  register_bits<u64>("b64");
  register_setp<float>("f32");
  register_setp<double>("f64");
  register_handler("mul.wide.s16", mul_wide<i16>);
  register_handler("mul.wide.u16", mul_wide<u16>);
  register_handler("mul.wide.s32", mul_wide<i32>);
  register_handler("mul.wide.u32", mul_wide<u32>);
  register_handler("mad.wide.s16", mad_wide<i16>);
  register_handler("mad.wide.u16", mad_wide<u16>);
  register_handler("mad.wide.s32", mad_wide<i32>);
  register_handler("mad.wide.u32", mad_wide<u32>);
  register_handler("max.relu.s32", relu_max<i32>);
  register_handler("min.relu.s32", relu_min<i32>);
  register_handler("shf.b32", funnel_shift);
  register_handler("lop3.b32", lop3);
  register_handler("prmt.b32", prmt);
  register_handler("and.pred", and_pred);
  register_handler("or.pred", or_pred);
  register_handler("xor.pred", xor_pred);
  register_handler("not.pred", not_pred);
  register_handler("mov.pred", mov_pred);
  register_handler("pack.b64.b32", pack<u64, u32>);
  register_handler("pack.b64.b16", pack<u64, u16>);
  register_handler("pack.b32.b16", pack<u32, u16>);
  register_handler("unpack.b64.b32", unpack<u64, u32>);
  register_handler("unpack.b64.b16", unpack<u64, u16>);
  register_handler("unpack.b32.b16", unpack<u32, u16>);
  register_handler("clock", clock);
}

}  // namespace ptxemu
