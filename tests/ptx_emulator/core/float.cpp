// Floating-point arithmetic. Approximate instructions are computed to within an ulp; hardware differs in the last bits.
#include <cmath>

#include "core.h"
#include "small_float.h"

namespace ptxemu {
namespace {

// imm of an arithmetic instruction
enum : i64 { kFtz = 1, kSat = 2, kDown = 4, kUp = 8, kZero = 16, kNanMode = 32, kRelu = 64 };

float finish(float r, i64 flags) {
  if (r != r) r = float_of(kNan);
  if (flags & kFtz) r = flushed(r);
  if (flags & kSat) r = r != r ? 0.0f : std::fmin(std::fmax(r, 0.0f), 1.0f);
  return r;
}
// The exact result `r64` (a double that holds it or is within its error `rest`) rounded the way the flags say.
float directed(double r64, double rest, i64 flags) {
  const float r = static_cast<float>(r64);
  if (std::isinf(r64) || r64 != r64) return r;
  const double difference = (r64 - static_cast<double>(r)) + rest;  // exact value minus r, in sign
  if (std::isinf(r))
    return flags & kZero || (flags & kDown && r > 0) || (flags & kUp && r < 0) ? std::nextafter(r, 0.0f) : r;
  if (flags & kDown && difference < 0) return std::nextafter(r, -INFINITY);
  if (flags & kUp && difference > 0) return std::nextafter(r, INFINITY);
  if (flags & kZero && ((r > 0 && difference < 0) || (r < 0 && difference > 0))) return std::nextafter(r, 0.0f);
  return r;
}
// Error of the double addition a + b, of which `s` is the result.
double sum_error(double a, double b, double s) {
  const double v = s - a;
  return (a - (s - v)) + (b - v);
}

enum Op { kAdd, kSub, kMul };

template <Op O>
float apply(float a, float b, i64 flags) {
  if (flags & kFtz) a = flushed(a), b = flushed(b);
  if (!(flags & (kDown | kUp | kZero))) return finish(O == kAdd ? a + b : O == kSub ? a - b : a * b, flags);
  if (O == kMul) return finish(directed(double{a} * b, 0, flags), flags);
  const double x = a, y = O == kSub ? -double{b} : double{b}, s = x + y;
  return finish(directed(s, sum_error(x, y, s), flags), flags);
}
float fused(float a, float b, float c, i64 flags) {
  if (flags & kFtz) a = flushed(a), b = flushed(b), c = flushed(c);
  float r;
  if (flags & (kDown | kUp | kZero)) {
    const double p = double{a} * b, s = p + c;
    r = directed(s, sum_error(p, c, s), flags);
  } else {
    r = std::fma(a, b, c);
  }
  if (flags & kRelu && !(r > 0)) r = r != r ? r : 0.0f;
  return finish(r, flags);
}

template <Op O>
Status plain_f32(Warp& w, const Instruction& in) {  // rn, no modifier
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<float>(w, in.x[0], [=](u32 l) {
    const float r = O == kAdd ? a[l] + b[l] : O == kSub ? a[l] - b[l] : a[l] * b[l];
    return r == r ? r : float_of(kNan);
  });
}
template <Op O>
Status binary_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<float>(w, in.x[0], [=, &in](u32 l) { return apply<O>(a[l], b[l], in.imm); });
}
// Two floats in a 64-bit register.
template <Op O>
Status binary_f32x2(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  float* d = row<float>(w, in.x[0]);
  for (u32 i = 0; i < 2 * kLanes; ++i)
    if (w.mask >> (i / 2) & 1) d[i] = apply<O>(a[i], b[i], in.imm);
  return Status::kNext;
}
Status fma_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]), *c = row<float>(w, in.x[3]);
  if (in.imm == 0)
    return each<float>(w, in.x[0], [=](u32 l) {
      const float r = __builtin_fmaf(a[l], b[l], c[l]);
      return r == r ? r : float_of(kNan);
    });
  return each<float>(w, in.x[0], [=, &in](u32 l) { return fused(a[l], b[l], c[l], in.imm); });
}
Status fma_f32x2(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]), *c = row<float>(w, in.x[3]);
  float* d = row<float>(w, in.x[0]);
  for (u32 i = 0; i < 2 * kLanes; ++i)
    if (w.mask >> (i / 2) & 1) d[i] = fused(a[i], b[i], c[i], in.imm);
  return Status::kNext;
}

// A NaN operand is ignored, unless .NaN; +0 is greater than -0.
inline float pick(float a, float b, bool greater, i64 flags) {
  if (flags & kFtz) a = flushed(a), b = flushed(b);
  if (a != a || b != b) {
    if (flags & kNanMode || (a != a && b != b)) return float_of(kNan);
    return a != a ? b : a;
  }
  if (a == b) return std::signbit(a) == greater ? b : a;
  return (a > b) == greater ? a : b;
}
template <bool Greater>
Status select_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<float>(w, in.x[0], [=, &in](u32 l) { return pick(a[l], b[l], Greater, in.imm); });
}
template <bool Greater>
Status select3_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]), *c = row<float>(w, in.x[3]);
  return each<float>(w, in.x[0],
                     [=, &in](u32 l) { return pick(pick(a[l], b[l], Greater, in.imm), c[l], Greater, in.imm); });
}

float divide(float a, float b) { return a / b; }
float rcp(float a) { return 1.0f / a; }
float rsqrt(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
float ex2(float a) { return static_cast<float>(std::exp2(static_cast<double>(a))); }
float lg2(float a) { return static_cast<float>(std::log2(static_cast<double>(a))); }
float root(float a) { return std::sqrt(a); }
float sine(float a) { return std::sin(a); }
float cosine(float a) { return std::cos(a); }
float hyperbolic(float a) { return std::tanh(a); }
float negative(float a) { return -a; }
float magnitude(float a) { return std::fabs(a); }

template <float (*F)(float)>
Status unary_f32(Warp& w, const Instruction& in) {
  const float* a = row<float>(w, in.x[1]);
  return each<float>(w, in.x[0], [=, &in](u32 l) { return finish(F(in.imm & kFtz ? flushed(a[l]) : a[l]), in.imm); });
}
template <float (*F)(float)>
Status sign_f32(Warp& w, const Instruction& in) {  // keeps a NaN's bits
  const float* a = row<float>(w, in.x[1]);
  return each<float>(w, in.x[0], [=, &in](u32 l) { return F(in.imm & kFtz ? flushed(a[l]) : a[l]); });
}
Status div_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<float>(w, in.x[0], [=, &in](u32 l) {
    const bool ftz = in.imm & kFtz;
    return finish(divide(ftz ? flushed(a[l]) : a[l], ftz ? flushed(b[l]) : b[l]), in.imm);
  });
}
Status copysign_f32(Warp& w, const Instruction& in) {
  const float *a = row<float>(w, in.x[1]), *b = row<float>(w, in.x[2]);
  return each<float>(w, in.x[0], [=](u32 l) { return std::copysign(b[l], a[l]); });  // the sign of a on b
}

// ---- doubles ----

#define BINARY_F64(NAME, EXPRESSION)                                         \
  Status NAME(Warp& w, const Instruction& in) {                              \
    const double *a = row<double>(w, in.x[1]), *b = row<double>(w, in.x[2]); \
    return each<double>(w, in.x[0], [=](u32 l) { return EXPRESSION; });      \
  }
BINARY_F64(add_f64, a[l] + b[l])
BINARY_F64(sub_f64, a[l] - b[l])
BINARY_F64(mul_f64, a[l] * b[l])
BINARY_F64(div_f64, a[l] / b[l])
BINARY_F64(max_f64, std::fmax(a[l], b[l]))
BINARY_F64(min_f64, std::fmin(a[l], b[l]))
#undef BINARY_F64
Status fma_f64(Warp& w, const Instruction& in) {
  const double *a = row<double>(w, in.x[1]), *b = row<double>(w, in.x[2]), *c = row<double>(w, in.x[3]);
  return each<double>(w, in.x[0], [=](u32 l) { return std::fma(a[l], b[l], c[l]); });
}
Status neg_f64(Warp& w, const Instruction& in) {
  const double* a = row<double>(w, in.x[1]);
  return each<double>(w, in.x[0], [=](u32 l) { return -a[l]; });
}

// ---- 16-bit floats, one or two in a register ----

struct Half {
  static float load(u16 h) { return from_f16(h); }
  static u16 store(double x) { return to_f16(x); }
};
struct Brain {
  static float load(u16 h) { return from_bf16(h); }
  static u16 store(double x) {
    if (x != x) return 0x7FFF;
    // Rounds once: to odd in float, then to nearest.
    float f = static_cast<float>(x);
    if (static_cast<double>(f) != x && !std::isinf(f)) {
      if (std::fabs(static_cast<double>(f)) > std::fabs(x)) f = std::nextafter(f, 0.0f);
      f = float_of(bits_of(f) | 1);
    }
    return to_bf16(f);
  }
};

enum HalfOp { kHalfAdd, kHalfSub, kHalfMul, kHalfMax, kHalfMin };

template <class H, HalfOp O>
u16 half_apply(u16 x, u16 y, i64 flags) {
  const float a = H::load(x), b = H::load(y);
  double r;
  if (O == kHalfMax || O == kHalfMin)
    r = pick(a, b, O == kHalfMax, flags);
  else
    r = O == kHalfAdd ? double{a} + b : O == kHalfSub ? double{a} - b : double{a} * b;
  if (flags & kRelu && r < 0) r = 0;
  if (flags & kSat) r = r != r ? 0.0 : std::fmin(std::fmax(r, 0.0), 1.0);
  return H::store(r);
}
template <class H>
u16 half_fused(u16 x, u16 y, u16 z, i64 flags) {
  double r = std::fma(double{H::load(x)}, double{H::load(y)}, double{H::load(z)});
  if (flags & kRelu && r < 0) r = 0;
  if (flags & kSat) r = r != r ? 0.0 : std::fmin(std::fmax(r, 0.0), 1.0);
  return H::store(r);
}
// N: halves in a register
template <class H, HalfOp O, int N>
Status half_binary(Warp& w, const Instruction& in) {
  const u16 *a = row<u16>(w, in.x[1]), *b = row<u16>(w, in.x[2]);
  u16* d = row<u16>(w, in.x[0]);
  for (u32 i = 0; i < N * kLanes; ++i)
    if (w.mask >> (i / N) & 1) d[i] = half_apply<H, O>(a[i], b[i], in.imm);
  return Status::kNext;
}
template <class H, int N>
Status half_fma(Warp& w, const Instruction& in) {
  const u16 *a = row<u16>(w, in.x[1]), *b = row<u16>(w, in.x[2]), *c = row<u16>(w, in.x[3]);
  u16* d = row<u16>(w, in.x[0]);
  for (u32 i = 0; i < N * kLanes; ++i)
    if (w.mask >> (i / N) & 1) d[i] = half_fused<H>(a[i], b[i], c[i], in.imm);
  return Status::kNext;
}
template <int N, bool Negate>
Status half_sign(Warp& w, const Instruction& in) {
  const u16* a = row<u16>(w, in.x[1]);
  u16* d = row<u16>(w, in.x[0]);
  for (u32 i = 0; i < N * kLanes; ++i)
    if (w.mask >> (i / N) & 1) d[i] = static_cast<u16>(Negate ? a[i] ^ 0x8000 : a[i] & 0x7FFF);
  return Status::kNext;
}
template <class H, int N>
Status half_ex2(Warp& w, const Instruction& in) {
  const u16* a = row<u16>(w, in.x[1]);
  u16* d = row<u16>(w, in.x[0]);
  for (u32 i = 0; i < N * kLanes; ++i)
    if (w.mask >> (i / N) & 1) d[i] = H::store(std::exp2(double{H::load(a[i])}));
  return Status::kNext;
}

template <class H, int N>
void register_half(const std::string& type) {
  register_handler("add." + type, half_binary<H, kHalfAdd, N>);
  register_handler("sub." + type, half_binary<H, kHalfSub, N>);
  register_handler("mul." + type, half_binary<H, kHalfMul, N>);
  register_handler("max." + type, half_binary<H, kHalfMax, N>);
  register_handler("min." + type, half_binary<H, kHalfMin, N>);
  register_handler("fma." + type, half_fma<H, N>);
  register_handler("neg." + type, half_sign<N, true>);
  register_handler("abs." + type, half_sign<N, false>);
  register_handler("ex2." + type, half_ex2<H, N>);
}

}  // namespace

void register_float() {
  register_handler("add.rn.f32", plain_f32<kAdd>);
  register_handler("sub.rn.f32", plain_f32<kSub>);
  register_handler("mul.rn.f32", plain_f32<kMul>);
  register_handler("add.f32", binary_f32<kAdd>);
  register_handler("sub.f32", binary_f32<kSub>);
  register_handler("mul.f32", binary_f32<kMul>);
  register_handler("add.f32x2", binary_f32x2<kAdd>);
  register_handler("sub.f32x2", binary_f32x2<kSub>);
  register_handler("mul.f32x2", binary_f32x2<kMul>);
  register_handler("fma.f32", fma_f32);
  register_handler("fma.f32x2", fma_f32x2);
  register_handler("max.f32", select_f32<true>);
  register_handler("min.f32", select_f32<false>);
  register_handler("max3.f32", select3_f32<true>);
  register_handler("min3.f32", select3_f32<false>);
  register_handler("div.f32", div_f32);
  register_handler("copysign.f32", copysign_f32);
  register_handler("neg.f32", sign_f32<negative>);
  register_handler("abs.f32", sign_f32<magnitude>);
  register_handler("rcp.f32", unary_f32<rcp>);
  register_handler("rsqrt.f32", unary_f32<rsqrt>);
  register_handler("sqrt.f32", unary_f32<root>);
  register_handler("ex2.f32", unary_f32<ex2>);
  register_handler("lg2.f32", unary_f32<lg2>);
  register_handler("sin.f32", unary_f32<sine>);
  register_handler("cos.f32", unary_f32<cosine>);
  register_handler("tanh.f32", unary_f32<hyperbolic>);
  register_handler("add.f64", add_f64);
  register_handler("sub.f64", sub_f64);
  register_handler("mul.f64", mul_f64);
  register_handler("div.f64", div_f64);
  register_handler("max.f64", max_f64);
  register_handler("min.f64", min_f64);
  register_handler("fma.f64", fma_f64);
  register_handler("neg.f64", neg_f64);
  register_half<Half, 1>("f16");
  register_half<Half, 2>("f16x2");
  register_half<Brain, 1>("bf16");
  register_half<Brain, 2>("bf16x2");
}

}  // namespace ptxemu
