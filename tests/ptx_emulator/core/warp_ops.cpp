// Instructions in which the lanes of a warp exchange values.
#include "core.h"
#include "small_float.h"

namespace ptxemu {
namespace {

// Lanes that take part: those of the member mask that have not exited. All must be here: with reconvergence at
// post-dominators, a lane that is elsewhere would never meet the others in this instruction.
u32 members(Warp& w, i32 mask_operand, const char* what) {
  const u32* m = row<u32>(w, mask_operand);
  u32 all = 0;
  for_lanes(w.mask, [&](u32 l) {
    all |= m[l] & w.alive;
    if (!(m[l] >> l & 1)) fail("%s: lane %u isn't in its own member mask %08x", what, l, m[l]);
    if (m[l] & w.alive & ~w.mask)
      fail("%s: lanes %08x of the member mask %08x are on another path", what, m[l] & w.alive & ~w.mask, m[l]);
  });
  return all;
}

enum Shuffle { kUp, kDown, kBfly, kIdx };

// x: d, p (or -1), a, b, c, member mask; imm: Shuffle
Status shfl(Warp& w, const Instruction& in) {
  members(w, in.x[5], "shfl.sync");
  const u32 *a = row<u32>(w, in.x[2]), *b = row<u32>(w, in.x[3]), *c = row<u32>(w, in.x[4]);
  u32 value[kLanes];
  u32 inside = 0;
  for (u32 l = 0; l < kLanes; ++l) {
    const u32 segment = c[l] >> 8 & 31, clamp = c[l] & 31, lo = l & segment, hi = lo | (clamp & ~segment);
    i32 j = 0;
    bool ok = false;
    switch (in.imm) {
      case kUp:
        j = static_cast<i32>(l) - static_cast<i32>(b[l] & 31), ok = j >= static_cast<i32>(hi);
        break;
      case kDown:
        j = static_cast<i32>(l + (b[l] & 31)), ok = j <= static_cast<i32>(hi);
        break;
      case kBfly:
        j = static_cast<i32>(l ^ (b[l] & 31)), ok = j <= static_cast<i32>(hi);
        break;
      default:
        j = static_cast<i32>(lo | (b[l] & 31 & ~segment)), ok = j <= static_cast<i32>(hi);
    }
    if (ok && w.mask >> l & 1 && !(w.mask >> (j & 31) & 1))
      fail("shfl.sync: lane %u reads lane %d, which isn't active", l, j);
    value[l] = a[ok ? static_cast<u32>(j) & 31 : l];
    inside |= static_cast<u32>(ok) << l;
  }
  each<u32>(w, in.x[0], [&](u32 l) { return value[l]; });
  if (in.x[1] >= 0) each_predicate(w, in.x[1], [&](u32 l) { return inside >> l & 1; });
  return Status::kNext;
}

enum Vote { kAll, kAny, kUni, kBallot };

// x: d, p, member mask; imm: Vote, bit 2 p is negated
Status vote(Warp& w, const Instruction& in) {
  const u32 who = members(w, in.x[2], "vote.sync");
  u32 p = predicate(w, in.x[1]);
  if (in.imm & 4) p = ~p;
  p &= who;
  const u32 kind = in.imm & 3;
  if (kind == kBallot) return each<u32>(w, in.x[0], [=](u32) { return p; });
  const bool result = kind == kAll ? p == who : kind == kAny ? p != 0 : p == who || p == 0;
  return each_predicate(w, in.x[0], [=](u32) { return result; });
}

// x: d, p (or -1), a, member mask; imm: all instead of any
template <class T>
Status match(Warp& w, const Instruction& in) {
  const u32 who = members(w, in.x[3], "match.sync");
  const T* a = row<T>(w, in.x[2]);
  u32 same[kLanes] = {};
  for_lanes(who, [&](u32 l) { for_lanes(who, [&](u32 k) { same[l] |= static_cast<u32>(a[l] == a[k]) << k; }); });
  if (in.imm == 0) return each<u32>(w, in.x[0], [&](u32 l) { return same[l]; });
  const bool all = same[first_lane(w)] == who;
  each<u32>(w, in.x[0], [&](u32) { return all ? who : 0; });
  if (in.x[1] >= 0) each_predicate(w, in.x[1], [&](u32) { return all; });
  return Status::kNext;
}

enum Reduce { kAdd, kMin, kMax, kAnd, kOr, kXor };

template <class T, Reduce R>
Status redux(Warp& w, const Instruction& in) {
  const u32 who = members(w, in.x[2], "redux.sync");
  const T* a = row<T>(w, in.x[1]);
  T r = a[first_lane(w)];
  for_lanes(who & (who - 1), [&](u32 l) {
    const T v = a[l];
    switch (R) {
      case kAdd:
        r = static_cast<T>(static_cast<u32>(r) + static_cast<u32>(v));
        break;
      case kMin:
        r = std::min(r, v);
        break;
      case kMax:
        r = std::max(r, v);
        break;
      case kAnd:
        r = static_cast<T>(static_cast<u32>(r) & static_cast<u32>(v));
        break;
      case kOr:
        r = static_cast<T>(static_cast<u32>(r) | static_cast<u32>(v));
        break;
      case kXor:
        r = static_cast<T>(static_cast<u32>(r) ^ static_cast<u32>(v));
        break;
    }
  });
  return each<T>(w, in.x[0], [=](u32) { return r; });
}
// imm: bit 0 max, bit 1 .abs, bit 2 .NaN
Status redux_f32(Warp& w, const Instruction& in) {
  const u32 who = members(w, in.x[2], "redux.sync");
  const float* a = row<float>(w, in.x[1]);
  float r = float_of(kNan);
  bool nan = false;
  for_lanes(who, [&](u32 l) {
    const float v = in.imm & 2 ? std::fabs(a[l]) : a[l];
    nan |= v != v;
    r = in.imm & 1 ? std::fmax(r, v) : std::fmin(r, v);
  });
  if ((nan && in.imm & 4) || r != r) r = float_of(kNan);
  return each<float>(w, in.x[0], [=](u32) { return r; });
}

Status activemask(Warp& w, const Instruction& in) {
  const u32 m = w.mask;
  return each<u32>(w, in.x[0], [=](u32) { return m; });
}
// x: d (or -1), p, member mask. The lowest lane is elected, as hardware does.
Status elect(Warp& w, const Instruction& in) {
  members(w, in.x[2], "elect.sync");
  const u32 leader = first_lane(w);
  if (in.x[0] >= 0) each<u32>(w, in.x[0], [=](u32) { return leader; });
  return each_predicate(w, in.x[1], [=](u32 l) { return l == leader; });
}
Status warp_sync(Warp& w, const Instruction& in) {
  members(w, in.x[0], "bar.warp.sync");
  return Status::kNext;
}

}  // namespace

void register_warp() {
  register_handler("shfl", shfl);
  register_handler("vote", vote);
  register_handler("match.b32", match<u32>);
  register_handler("match.b64", match<u64>);
  register_handler("redux.add.s32", redux<i32, kAdd>);
  register_handler("redux.add.u32", redux<u32, kAdd>);
  register_handler("redux.min.s32", redux<i32, kMin>);
  register_handler("redux.min.u32", redux<u32, kMin>);
  register_handler("redux.max.s32", redux<i32, kMax>);
  register_handler("redux.max.u32", redux<u32, kMax>);
  register_handler("redux.and.b32", redux<u32, kAnd>);
  register_handler("redux.or.b32", redux<u32, kOr>);
  register_handler("redux.xor.b32", redux<u32, kXor>);
  register_handler("redux.f32", redux_f32);
  register_handler("activemask", activemask);
  register_handler("elect", elect);
  register_handler("bar.warp.sync", warp_sync);
}

}  // namespace ptxemu
