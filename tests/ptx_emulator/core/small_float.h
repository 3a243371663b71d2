// Conversions between float and the formats of 16 and 8 bits or fewer, all rounding to nearest even.
#pragma once

#include <cmath>

#include "core.h"

namespace ptxemu {

inline u32 bits_of(float x) {
  u32 u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(u32 u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
constexpr u32 kNan = 0x7FFFFFFF;  // the NaN that arithmetic returns

inline float from_bf16(u16 h) { return float_of(u32{h} << 16); }
inline u16 to_bf16(float x) {
  if (x != x) return 0x7FFF;
  const u32 u = bits_of(x);
  return static_cast<u16>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// A binary format by its widths. `finite`: e4m3's layout, with no infinity and one NaN; e2m1 and the like have neither.
struct Format {
  int exponent, mantissa, bias;
  bool infinity, nan;
  float largest;
};
constexpr Format kF16{5, 10, 15, true, true, 65504.0f}, kE4m3{4, 3, 7, false, true, 448.0f},
    kE5m2{5, 2, 15, true, true, 57344.0f}, kE2m1{2, 1, 1, false, false, 6.0f}, kE3m2{3, 2, 3, false, false, 28.0f},
    kE2m3{2, 3, 1, false, false, 7.5f};

inline float decode(const Format& f, u32 code) {
  const int e = static_cast<int>(code >> f.mantissa & ((1u << f.exponent) - 1));
  const u32 m = code & ((1u << f.mantissa) - 1);
  const float sign = code >> (f.exponent + f.mantissa) & 1 ? -1.0f : 1.0f;
  const int top = (1 << f.exponent) - 1;
  if (f.infinity && e == top) return m ? float_of(kNan) : sign * INFINITY;
  if (f.nan && !f.infinity && e == top && m == (1u << f.mantissa) - 1) return float_of(kNan);
  if (e == 0) return sign * std::ldexp(static_cast<float>(m), 1 - f.bias - f.mantissa);
  return sign * std::ldexp(static_cast<float>(m | 1u << f.mantissa), e - f.bias - f.mantissa);
}

// Rounds a double once. `saturate`: to the largest finite value instead of infinity (or NaN where there is none).
inline u32 encode(const Format& f, double x, bool saturate) {
  const u32 sign = std::signbit(x) ? 1u << (f.exponent + f.mantissa) : 0;
  const u32 top = (1u << f.exponent) - 1, mask = (1u << f.mantissa) - 1;
  const u32 nan = f.infinity ? top << f.mantissa | mask : f.nan ? (top << f.mantissa | mask) : 0;
  const u32 infinity = f.infinity ? top << f.mantissa : nan;
  const u32 most = f.infinity ? (top - 1) << f.mantissa | mask
                   : f.nan    ? (top << f.mantissa | (mask - 1))
                              : (top << f.mantissa | mask);
  if (x != x) return f.infinity || f.nan ? nan : most;  // formats without NaN: the manual gives the positive maximum
  double a = std::fabs(x);
  if (std::isinf(a)) return sign | (saturate ? most : infinity);
  if (a == 0) return sign;
  int e;
  std::frexp(a, &e);              // a = [0.5, 1) * 2^e
  const int lowest = 1 - f.bias;  // exponent of the smallest normal number
  const int scale = std::max(e - 1, lowest) - f.mantissa;
  const double steps = std::nearbyint(std::ldexp(a, -scale));  // an integer below 2^(mantissa + 2)
  const double rounded = std::ldexp(steps, scale);
  if (rounded > static_cast<double>(f.largest)) return sign | (saturate ? most : infinity);
  if (steps < (1 << f.mantissa)) return sign | static_cast<u32>(steps);  // subnormal: scale is that of the lowest
  int exponent;
  std::frexp(rounded, &exponent);
  const u32 significand = static_cast<u32>(std::ldexp(rounded, f.mantissa + 1 - exponent));
  return sign | static_cast<u32>(exponent - 1 + f.bias) << f.mantissa | (significand & mask);
}

#ifdef __F16C__
inline float from_f16(u16 h) {
  return __builtin_ia32_vcvtph2ps((__attribute__((vector_size(16))) short){static_cast<short>(h)})[0];
}
#else
inline float from_f16(u16 h) { return decode(kF16, h); }
#endif
inline u16 to_f16(double x) { return x != x ? 0x7FFF : static_cast<u16>(encode(kF16, x, false)); }

inline const float* table_of(const Format& f) {
  struct Tables {
    float e4m3[256], e5m2[256];
    Tables() {
      for (u32 i = 0; i < 256; ++i) e4m3[i] = decode(kE4m3, i), e5m2[i] = decode(kE5m2, i);
    }
  };
  static const Tables tables;
  return f.infinity ? tables.e5m2 : tables.e4m3;
}

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// ---- rows of a matrix operand ----

enum class Element : int { kF16, kBf16, kE4m3, kE5m2, kTf32 };
inline int size_of(Element e) { return e == Element::kTf32 ? 4 : e == Element::kF16 || e == Element::kBf16 ? 2 : 1; }

// `n` consecutive elements as floats.
inline void widen(Element e, const u8* from, float* to, int n) {
  switch (e) {
    case Element::kBf16:
      for (int i = 0; i < n; ++i) {
        u16 h;
        std::memcpy(&h, from + 2 * i, 2);
        to[i] = from_bf16(h);
      }
      return;
    case Element::kF16:
      for (int i = 0; i < n; ++i) {
        u16 h;
        std::memcpy(&h, from + 2 * i, 2);
        to[i] = from_f16(h);
      }
      return;
    case Element::kE4m3:
    case Element::kE5m2: {
      const float* table = table_of(e == Element::kE4m3 ? kE4m3 : kE5m2);
      for (int i = 0; i < n; ++i) to[i] = table[from[i]];
      return;
    }
    case Element::kTf32:
      for (int i = 0; i < n; ++i) {
        u32 u;
        std::memcpy(&u, from + 4 * i, 4);
        to[i] = float_of(u & 0xFFFFE000);  // the tensor core ignores the low 13 bits
      }
      return;
  }
}

}  // namespace ptxemu
