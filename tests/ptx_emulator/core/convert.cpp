// cvt: between integers, floats and the small formats.
#include <cmath>
#include <limits>

#include "core.h"
#include "small_float.h"

namespace ptxemu {
namespace {

// Integer to integer. imm: source bits, source signed << 8, destination bits << 16, destination signed << 24, .sat
// << 25. The row types are those of the registers: a result narrower than its register is extended by its own sign.
template <class D, class S>
Status integer(Warp& w, const Instruction& in) {
  const S* a = row<S>(w, in.x[1]);
  const u32 from = in.imm & 255, to = in.imm >> 16 & 255;
  const bool from_signed = in.imm >> 8 & 1, to_signed = in.imm >> 24 & 1, saturate = in.imm >> 25 & 1;
  const u64 limit = to >= 64 ? ~u64{0} : (u64{1} << to) - 1;
  return each<D>(w, in.x[0], [=](u32 l) {
    u64 v = static_cast<u64>(a[l]) << (64 - from);
    v = from_signed ? static_cast<u64>(static_cast<i64>(v) >> (64 - from)) : v >> (64 - from);
    if (saturate) {
      const __int128 x = from_signed ? __int128{static_cast<i64>(v)} : __int128{v};
      const __int128 high = to_signed ? limit >> 1 : limit,
                     low = to_signed ? -static_cast<__int128>(limit >> 1) - 1 : 0;
      v = static_cast<u64>(x > high ? high : x < low ? low : x);
    }
    v &= limit;
    if (to_signed && v >> (to - 1) & 1) v |= ~limit;
    return static_cast<D>(v);
  });
}

double rounded(double x, i64 how) {
  switch (how) {
    case 0:
      return std::nearbyint(x);
    case 1:
      return std::trunc(x);
    case 2:
      return std::floor(x);
    default:
      return std::ceil(x);
  }
}

// Float to integer of type T in a row of D. imm: rounding (0 rni, 1 rzi, 2 rmi, 3 rpi), bit 4 ftz.
template <class D, class T, class S>
Status to_integer(Warp& w, const Instruction& in) {
  const S* a = row<S>(w, in.x[1]);
  return each<D>(w, in.x[0], [=, &in](u32 l) {
    S x = a[l];
    if (in.imm & 16 && std::fabs(x) < static_cast<S>(1.17549435e-38f)) x = 0;
    const double v = rounded(static_cast<double>(x), in.imm & 3);
    if (v != v) return static_cast<D>(sizeof(T) == 8 ? std::numeric_limits<T>::min() : T(0));
    if (v >= static_cast<double>(std::numeric_limits<T>::max())) return static_cast<D>(std::numeric_limits<T>::max());
    if (v <= static_cast<double>(std::numeric_limits<T>::min())) return static_cast<D>(std::numeric_limits<T>::min());
    return static_cast<D>(static_cast<T>(v));
  });
}
template <class D, class T>
Status from_integer(Warp& w, const Instruction& in) {
  const T* a = row<T>(w, in.x[1]);
  return each<D>(w, in.x[0], [=](u32 l) { return static_cast<D>(a[l]); });
}
// imm: rounding to an integer as above, bit 4 ftz, bit 5 keep the value, bit 6 sat
Status float_to_float(Warp& w, const Instruction& in) {
  const float* a = row<float>(w, in.x[1]);
  return each<float>(w, in.x[0], [=, &in](u32 l) {
    float x = in.imm & 16 ? flushed(a[l]) : a[l];
    if (!(in.imm & 32)) x = static_cast<float>(rounded(static_cast<double>(x), in.imm & 3));
    if (in.imm & 64) x = x != x ? 0.0f : std::fmin(std::fmax(x, 0.0f), 1.0f);
    return x;
  });
}
Status widen_f64(Warp& w, const Instruction& in) {
  const float* a = row<float>(w, in.x[1]);
  return each<double>(w, in.x[0], [=](u32 l) { return double{a[l]}; });
}
Status narrow_f64(Warp& w, const Instruction& in) {
  const double* a = row<double>(w, in.x[1]);
  return each<float>(w, in.x[0], [=](u32 l) { return static_cast<float>(a[l]); });
}

// ---- small formats; imm: bit 0 relu, bit 1 satfinite, bit 2 toward zero ----

enum Small { kBf16s, kF16s, kE4m3s, kE5m2s, kE2m1s };

u32 narrowed(Small kind, float x, i64 flags) {
  if (flags & 1 && x < 0) x = 0;
  switch (kind) {
    case kBf16s:
      if (flags & 4 && x == x) return bits_of(x) >> 16;
      if (flags & 2 && x == x && std::fabs(x) > 3.3895314e38f) return bits_of(std::copysign(3.3895314e38f, x)) >> 16;
      return to_bf16(x);
    case kF16s: {
      if (x != x) return 0x7FFF;
      if (flags & 2 && std::fabs(x) > 65504.0f) x = std::copysign(65504.0f, x);
      u32 h = encode(kF16, double{x}, false);
      if (flags & 4 && std::fabs(decode(kF16, h)) > std::fabs(x)) --h;
      return h;
    }
    case kE4m3s:
      return encode(kE4m3, double{x}, true);
    case kE5m2s:
      return encode(kE5m2, double{x}, true);
    case kE2m1s:
      return encode(kE2m1, double{x}, true);
  }
  return 0;
}
// d = {a in the upper half, b in the lower}
template <class D, Small K, int Bits>
Status narrow_pair(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<D>(w, in.x[0], [=, &in](u32 l) {
    return static_cast<D>(narrowed(K, a[l], in.imm) << Bits | narrowed(K, b[l], in.imm));
  });
}
template <Small K>
Status narrow_one(Warp& w, const Instruction& in) {
  const float* a = row<float>(w, in.x[1]);
  return each<u16>(w, in.x[0], [=, &in](u32 l) { return static_cast<u16>(narrowed(K, a[l], in.imm)); });
}
// e4m3x2 and the like from f16x2
template <Small K, int Bits>
Status narrow_halves(Warp& w, const Instruction& in) {
  const u32* a = row<u32>(w, in.x[1]);
  return each<u16>(w, in.x[0], [=, &in](u32 l) {
    return static_cast<u16>(narrowed(K, from_f16(static_cast<u16>(a[l] >> 16)), in.imm) << Bits |
                            narrowed(K, from_f16(static_cast<u16>(a[l])), in.imm));
  });
}
// The f16 of every code: encoding anew took half the time of programs that read fp8 caches.
template <Small K>
const u16* halves() {
  static const auto table = [] {
    std::array<u16, 256> all;
    for (u32 code = 0; code < 256; ++code)
      all[code] = to_f16(K == kE2m1s ? decode(kE2m1, code & 15) : table_of(K == kE4m3s ? kE4m3 : kE5m2)[code]);
    return all;
  }();
  return table.data();
}
template <Small K>
Status widen_pair(Warp& w, const Instruction& in) {
  const u16 *a = row<u16>(w, in.x[1]), *table = halves<K>();
  const bool relu = in.imm & 1;
  const auto half = [=](u32 code) {
    const u32 h = table[K == kE2m1s ? code & 15 : code & 255];
    return relu && h >> 15 ? 0u : h;
  };
  return each<u32>(w, in.x[0], [=](u32 l) {
    const int bits = K == kE2m1s ? 4 : 8;
    return half(a[l] >> bits) << 16 | half(a[l]);
  });
}
Status bf16_to_f32(Warp& w, const Instruction& in) {
  const u16* a = row<u16>(w, in.x[1]);
  return each<float>(w, in.x[0], [=](u32 l) { return from_bf16(a[l]); });
}
Status f16_to_f32(Warp& w, const Instruction& in) {
  const u16* a = row<u16>(w, in.x[1]);
  return each<float>(w, in.x[0], [=](u32 l) { return from_f16(a[l]); });
}

template <class T>
void register_number(const std::string& type) {
  using Row = std::conditional_t<sizeof(T) == 8, T, std::conditional_t<sizeof(T) == 4, T, u16>>;
  register_handler("cvt." + type + ".f32", to_integer<Row, T, float>);
  register_handler("cvt." + type + ".f64", to_integer<Row, T, double>);
  register_handler("cvt.f32." + type, from_integer<float, T>);
  register_handler("cvt.f64." + type, from_integer<double, T>);
}

}  // namespace

void register_convert() {
  register_handler("cvt.int.16.16", integer<u16, u16>);
  register_handler("cvt.int.16.32", integer<u16, u32>);
  register_handler("cvt.int.16.64", integer<u16, u64>);
  register_handler("cvt.int.32.16", integer<u32, u16>);
  register_handler("cvt.int.32.32", integer<u32, u32>);
  register_handler("cvt.int.32.64", integer<u32, u64>);
  register_handler("cvt.int.64.16", integer<u64, u16>);
  register_handler("cvt.int.64.32", integer<u64, u32>);
  register_handler("cvt.int.64.64", integer<u64, u64>);
  register_number<i16>("s16");
  register_number<u16>("u16");
  register_number<i32>("s32");
  register_number<u32>("u32");
  register_number<i64>("s64");
  register_number<u64>("u64");
  register_handler("cvt.f32.f32", float_to_float);
  register_handler("cvt.f64.f32", widen_f64);
  register_handler("cvt.f32.f64", narrow_f64);
  register_handler("cvt.f32.bf16", bf16_to_f32);
  register_handler("cvt.f32.f16", f16_to_f32);
  register_handler("cvt.bf16.f32", narrow_one<kBf16s>);
  register_handler("cvt.f16.f32", narrow_one<kF16s>);
  register_handler("cvt.bf16x2.f32", narrow_pair<u32, kBf16s, 16>);
  register_handler("cvt.f16x2.f32", narrow_pair<u32, kF16s, 16>);
  register_handler("cvt.e4m3x2.f32", narrow_pair<u16, kE4m3s, 8>);
  register_handler("cvt.e5m2x2.f32", narrow_pair<u16, kE5m2s, 8>);
  register_handler("cvt.e2m1x2.f32", narrow_pair<u16, kE2m1s, 4>);
  register_handler("cvt.e4m3x2.f16x2", narrow_halves<kE4m3s, 8>);
  register_handler("cvt.e5m2x2.f16x2", narrow_halves<kE5m2s, 8>);
  register_handler("cvt.f16x2.e4m3x2", widen_pair<kE4m3s>);
  register_handler("cvt.f16x2.e5m2x2", widen_pair<kE5m2s>);
  register_handler("cvt.f16x2.e2m1x2", widen_pair<kE2m1s>);
}

}  // namespace ptxemu
