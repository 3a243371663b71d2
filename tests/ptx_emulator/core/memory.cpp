// Loads, stores, atomics, matrix loads and stores.
#include "memory.h"

#include <cmath>

#include "small_float.h"

namespace ptxemu {

SharedPlace shared_place(Warp& w, u64 address, u32 bytes, bool cluster, const char* what) {
  if (address >> 32) fail("%s: %#llx isn't a shared address", what, (unsigned long long)address);
  Cta& owner = cluster ? w.cta->cluster->owner(static_cast<u32>(address)) : *w.cta;
  if (cluster && &owner != w.cta && owner.live == 0) fail("%s: CTA %u of the cluster has exited", what, owner.rank);
  return {&owner, owner.offset(static_cast<u32>(address), bytes, what)};
}

void check_proxy(Cta& cta, u32 offset, u32 bytes, const char* what, i32 line) {
  for (u32 g = offset / 16; g < (offset + bytes + 15) / 16; ++g)
    if (const u16 tag = cta.unfenced[g]) {
      cta.machine->report("no fence.proxy.async between a generic write by warp %u and %s (PTX line %d)",
                          (tag - 1u) % 64, what, line);
      return;
    }
}

namespace {

u8* reach_shared(Warp& w, u64 address, u32 bytes, bool write, bool cluster) {
  const SharedPlace p = shared_place(w, address, bytes, cluster, write ? "store" : "load");
  if (Race* race = w.cta->cluster->race.get()) race->shared(*p.cta, race->warp(w), p.offset, bytes, write, w.line);
  if (write) {
    ++w.cta->machine->progress;
    for (u32 g = p.offset / 16; g <= (p.offset + bytes - 1) / 16; ++g)
      if (p.cta->unfenced[g] != w.tag()) {
        p.cta->unfenced[g] = w.tag();
        w.unfenced.push_back({p.cta, g});
      }
  }
  return p.cta->shared.data() + p.offset;
}

}  // namespace

u8* reach(Warp& w, Space space, u64 address, u32 lane, u32 bytes, bool write) {
  if (address & (bytes - 1)) fail("misaligned access of %u bytes at %#llx", bytes, (unsigned long long)address);
  Machine& machine = *w.cta->machine;
  if (space == Space::kGeneric) {
    const u64 window = address >> 56 << 56;
    if (window == kSharedWindow) return reach_shared(w, address - window, bytes, write, true);
    if (window == kLocalWindow)
      space = Space::kLocal, address -= window;
    else if (window == kParamWindow)
      space = Space::kParam, address -= window;
    else
      space = Space::kGlobal;
  }
  switch (space) {
    case Space::kGlobal:
      if (write) ++machine.progress;
      return machine.global(address, bytes, write);
    case Space::kShared:
    case Space::kSharedCluster:
      return reach_shared(w, address, bytes, write, space == Space::kSharedCluster);
    case Space::kLocal:
      if (address + bytes > w.program->local_bytes)
        fail("local memory access out of bounds: %#llx", (unsigned long long)address);
      return w.local.data() + size_t{lane} * w.program->local_bytes + address;
    case Space::kParam:
      if (write || address + bytes > machine.spec->param_bytes)
        fail("bad access to the parameters at %#llx", (unsigned long long)address);
      return const_cast<u8*>(machine.spec->params) + address;
    default:
      fail("unknown space");
  }
}

namespace {

enum RegisterWidth { k16, k32, k64 };

// ld. x: address, N destinations (-1: none). imm: Space, register width << 4, signed << 6.
template <int Bytes, int N>
Status load(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const Space space = static_cast<Space>(in.imm & 15);
  u8 data[kLanes][Bytes * N];
  for_lanes(w.mask, [&](u32 l) { std::memcpy(data[l], reach(w, space, a[l], l, Bytes * N, false), Bytes * N); });
  const u32 width = in.imm >> 4 & 3;
  const bool is_signed = in.imm >> 6 & 1;
  for (int i = 0; i < N; ++i) {
    if (in.x[3 + i] < 0) continue;
    const auto value = [&](u32 l) {
      u64 v = 0;
      std::memcpy(&v, data[l] + Bytes * i, Bytes);
      if (is_signed) v = static_cast<u64>(static_cast<i64>(v << (64 - 8 * Bytes)) >> (64 - 8 * Bytes));
      return v;
    };
    if (width == k16)
      each<u16>(w, in.x[3 + i], [&](u32 l) { return w.mask >> l & 1 ? static_cast<u16>(value(l)) : u16{0}; });
    if (width == k32)
      each<u32>(w, in.x[3 + i], [&](u32 l) { return w.mask >> l & 1 ? static_cast<u32>(value(l)) : 0u; });
    if (width == k64) each<u64>(w, in.x[3 + i], [&](u32 l) { return w.mask >> l & 1 ? value(l) : u64{0}; });
  }
  return Status::kNext;
}

template <int Bytes>
void gather(Warp& w, i32 source, u32 width, u32 lane, u8* to) {
  if (width == k16) std::memcpy(to, row<u16>(w, source) + lane, Bytes < 2 ? Bytes : 2);
  if (width == k32) std::memcpy(to, row<u32>(w, source) + lane, Bytes < 4 ? Bytes : 4);
  if (width == k64) std::memcpy(to, row<u64>(w, source) + lane, Bytes);
}

// st. x: address, N sources; imm as ld.
template <int Bytes, int N>
Status store(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const Space space = static_cast<Space>(in.imm & 15);
  const u32 width = in.imm >> 4 & 3;
  for_lanes(w.mask, [&](u32 l) {
    u8* to = reach(w, space, a[l], l, Bytes * N, true);
    for (int i = 0; i < N; ++i) gather<Bytes>(w, in.x[3 + i], width, l, to + Bytes * i);
  });
  return Status::kNext;
}

// st.async: x: address, mbarrier address, N sources. One operation for all lanes with the same mbarrier.
template <int Bytes, int N>
Status store_async(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x), b(w, in.x + 3);
  struct Piece {
    u32 offset;
    std::array<u8, Bytes * N> data;
  };
  Race* race = w.cta->cluster->race.get();
  const u32 agent = race ? race->issue(Race::kStAsyncOf, *w.cta, w.index, w) : 0;
  for (u32 left = w.mask; left;) {
    const u32 bar = static_cast<u32>(b[static_cast<u32>(__builtin_ctz(left))]);
    Cta* to = &w.cta->cluster->owner(bar);
    to->mbarrier(bar);
    std::vector<Piece> pieces;
    u32 lanes = 0;
    for_lanes(left, [&](u32 l) {
      if (b[l] != bar) return;
      lanes |= 1u << l;
      if (a[l] % (Bytes * N)) fail("misaligned st.async");
      const SharedPlace place = shared_place(w, a[l], Bytes * N, true, "st.async");
      if (place.cta != to) fail("st.async: the mbarrier is in another CTA than the data");
      pieces.push_back({place.offset, {}});
      for (int i = 0; i < N; ++i)
        gather<Bytes>(w, in.x[6 + i], Bytes == 8 ? k64 : k32, l, pieces.back().data.data() + Bytes * i);
      if (race) race->shared(*to, agent, place.offset, Bytes * N, true, w.line);
    });
    left &= ~lanes;
    Clock clock;
    if (race) clock = race->snapshot(agent);
    w.cta->cluster->submit(w.cta->tma, kStAsync, lanes, [=, pieces = std::move(pieces)] {
      for (const Piece& p : pieces) std::memcpy(to->shared.data() + p.offset, p.data.data(), p.data.size());
      if (race) race->release(Race::mbarrier_object(*to, bar & 0xFFFFFF), clock);
      to->complete_bytes(bar, static_cast<i64>(Bytes) * N * static_cast<i64>(pieces.size()));
    });
  }
  return Status::kNext;
}

// ---- atomics ----

enum Atomic { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kInc, kDec };

template <class T, Atomic A>
T applied(T old, T v) {
  if constexpr (A == kAdd) return static_cast<T>(old + v);
  if constexpr (A == kMin) return v < old ? v : old;
  if constexpr (A == kMax) return v > old ? v : old;
  if constexpr (A == kExch) return v;
  if constexpr (std::is_integral_v<T>) {
    if constexpr (A == kAnd) return old & v;
    if constexpr (A == kOr) return old | v;
    if constexpr (A == kXor) return old ^ v;
    if constexpr (A == kInc) return old >= v ? T(0) : static_cast<T>(old + 1);
    if constexpr (A == kDec) return old == 0 || old > v ? v : static_cast<T>(old - 1);
  }
  return old;
}

// atom and red: x: address, operand, d (-1: red). imm: Space.
template <class T, Atomic A>
Status atomic(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const T* v = row<T>(w, in.x[3]);
  T old[kLanes] = {};
  for_lanes(w.mask, [&](u32 l) {
    u8* p = reach(w, static_cast<Space>(in.imm & 15), a[l], l, sizeof(T), true);
    std::memcpy(&old[l], p, sizeof(T));
    const T next = applied<T, A>(old[l], v[l]);
    std::memcpy(p, &next, sizeof(T));
  });
  return in.x[4] < 0 ? Status::kNext : each<T>(w, in.x[4], [&](u32 l) { return old[l]; });
}
// x: address, compare, value, d
template <class T>
Status compare_and_swap(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const T *c = row<T>(w, in.x[3]), *v = row<T>(w, in.x[4]);
  T old[kLanes] = {};
  for_lanes(w.mask, [&](u32 l) {
    u8* p = reach(w, static_cast<Space>(in.imm & 15), a[l], l, sizeof(T), true);
    std::memcpy(&old[l], p, sizeof(T));
    if (old[l] == c[l]) std::memcpy(p, &v[l], sizeof(T));
  });
  return in.x[5] < 0 ? Status::kNext : each<T>(w, in.x[5], [&](u32 l) { return old[l]; });
}
// red.add of N floats; x: address, N sources
template <int N>
Status add_floats(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  for_lanes(w.mask, [&](u32 l) {
    u8* p = reach(w, static_cast<Space>(in.imm & 15), a[l], l, 4 * N, true);
    for (int i = 0; i < N; ++i) {
      float x;
      std::memcpy(&x, p + 4 * i, 4);
      x += row<float>(w, in.x[3 + i])[l];
      std::memcpy(p + 4 * i, &x, 4);
    }
  });
  return Status::kNext;
}
// add of two 16-bit floats; imm: Space, bf16 << 4. x: address, operand, d
Status add_halves(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const u32* v = row<u32>(w, in.x[3]);
  u32 old[kLanes] = {};
  const bool brain = in.imm >> 4 & 1;
  const auto sum = [&](u16 x, u16 y) {
    return brain ? to_bf16(from_bf16(x) + from_bf16(y)) : to_f16(double{from_f16(x)} + from_f16(y));
  };
  for_lanes(w.mask, [&](u32 l) {
    u8* p = reach(w, static_cast<Space>(in.imm & 15), a[l], l, 4, true);
    std::memcpy(&old[l], p, 4);
    const u32 next = static_cast<u32>(sum(static_cast<u16>(old[l] >> 16), static_cast<u16>(v[l] >> 16))) << 16 |
                     sum(static_cast<u16>(old[l]), static_cast<u16>(v[l]));
    std::memcpy(p, &next, 4);
  });
  return in.x[4] < 0 ? Status::kNext : each<u32>(w, in.x[4], [&](u32 l) { return old[l]; });
}

template <class T>
void register_atomic(const std::string& type) {
  register_handler("atom.add." + type, atomic<T, kAdd>);
  register_handler("atom.min." + type, atomic<T, kMin>);
  register_handler("atom.max." + type, atomic<T, kMax>);
  if constexpr (std::is_integral_v<T>) {
    register_handler("atom.and." + type, atomic<T, kAnd>);
    register_handler("atom.or." + type, atomic<T, kOr>);
    register_handler("atom.xor." + type, atomic<T, kXor>);
    register_handler("atom.exch." + type, atomic<T, kExch>);
    register_handler("atom.inc." + type, atomic<T, kInc>);
    register_handler("atom.dec." + type, atomic<T, kDec>);
    register_handler("atom.cas." + type, compare_and_swap<T>);
  }
}

// ---- 8x8 matrices of 16-bit elements ----

// Lane 4r + c holds elements 2c and 2c + 1 of row r. Lanes 8i to 8i + 7 give the row addresses of matrix i.
// x: address, registers. imm: number of matrices, transposed << 8.
Status ldmatrix(Warp& w, const Instruction& in) {
  w.require_converged("ldmatrix");
  const Addresses a(w, in.x);
  const u32 count = in.imm & 255;
  const bool transposed = in.imm >> 8 & 1;
  u32 value[4][kLanes];
  for (u32 i = 0; i < count; ++i) {
    u16 m[8][8];
    for (u32 r = 0; r < 8; ++r) std::memcpy(m[r], reach(w, Space::kShared, a[8 * i + r], 0, 16, false), 16);
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 r = l / 4, c = 2 * (l % 4);
      value[i][l] = transposed ? m[c][r] | u32{m[c + 1][r]} << 16 : m[r][c] | u32{m[r][c + 1]} << 16;
    }
  }
  for (u32 i = 0; i < count; ++i) each<u32>(w, in.x[3 + i], [&](u32 l) { return value[i][l]; });
  return Status::kNext;
}
Status stmatrix(Warp& w, const Instruction& in) {
  w.require_converged("stmatrix");
  const Addresses a(w, in.x);
  const u32 count = in.imm & 255;
  const bool transposed = in.imm >> 8 & 1;
  for (u32 i = 0; i < count; ++i) {
    u16 m[8][8];
    const u32* v = row<u32>(w, in.x[3 + i]);
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 r = l / 4, c = 2 * (l % 4);
      (transposed ? m[c][r] : m[r][c]) = static_cast<u16>(v[l]);
      (transposed ? m[c + 1][r] : m[r][c + 1]) = static_cast<u16>(v[l] >> 16);
    }
    for (u32 r = 0; r < 8; ++r) std::memcpy(reach(w, Space::kShared, a[8 * i + r], 0, 16, true), m[r], 16);
  }
  return Status::kNext;
}

// ---- addresses ----

// x: d, address, rank. imm: 64 for a generic address
Status mapa(Warp& w, const Instruction& in) {
  const u32* rank = row<u32>(w, in.x[2]);
  const size_t size = w.cta->cluster->ctas.size();
  for_lanes(w.mask, [&](u32 l) {
    if (rank[l] >= size) fail("mapa: CTA %u of a cluster of %zu", rank[l], size);
  });
  const u64 low = (u64{1} << kRankShift) - 1;
  if (in.imm == 64) {
    const u64* a = row<u64>(w, in.x[1]);
    return each<u64>(w, in.x[0],
                     [=](u32 l) { return (a[l] & ~u64{0xFFFFFFFF}) | u64{rank[l]} << kRankShift | (a[l] & low); });
  }
  const u32* a = row<u32>(w, in.x[1]);
  return each<u32>(w, in.x[0], [=](u32 l) { return rank[l] << kRankShift | static_cast<u32>(a[l] & low); });
}
Status ctarank(Warp& w, const Instruction& in) {
  const u32* a = row<u32>(w, in.x[1]);
  return each<u32>(w, in.x[0], [=](u32 l) { return a[l] >> kRankShift; });
}
// x: p, a; imm: the window's top byte, or 0 for global
Status isspacep(Warp& w, const Instruction& in) {
  const u64* a = row<u64>(w, in.x[1]);
  return each_predicate(w, in.x[0], [=, &in](u32 l) { return static_cast<i64>(a[l] >> 56) == in.imm; });
}
// prefetch and the like: checks nothing, since hardware ignores bad addresses there
Status ignore(Warp&, const Instruction&) { return Status::kNext; }

template <int Bytes>
void register_sized(const std::string& size) {
  register_handler("ld." + size + ".1", load<Bytes, 1>);
  register_handler("ld." + size + ".2", load<Bytes, 2>);
  register_handler("ld." + size + ".4", load<Bytes, 4>);
  register_handler("st." + size + ".1", store<Bytes, 1>);
  register_handler("st." + size + ".2", store<Bytes, 2>);
  register_handler("st." + size + ".4", store<Bytes, 4>);
}

}  // namespace

void register_memory() {
  register_sized<1>("8");
  register_sized<2>("16");
  register_sized<4>("32");
  register_sized<8>("64");
  register_handler("ld.32.8", load<4, 8>);
  register_handler("st.32.8", store<4, 8>);
  register_handler("st.async.32.1", store_async<4, 1>);
  register_handler("st.async.32.2", store_async<4, 2>);
  register_handler("st.async.32.4", store_async<4, 4>);
  register_handler("st.async.64.1", store_async<8, 1>);
  register_handler("st.async.64.2", store_async<8, 2>);
  register_atomic<i32>("s32");
  register_atomic<u32>("u32");
  register_atomic<i64>("s64");
  register_atomic<u64>("u64");
  register_atomic<float>("f32");
  register_atomic<double>("f64");
  register_handler("red.add.f32.2", add_floats<2>);
  register_handler("red.add.f32.4", add_floats<4>);
  register_handler("atom.add.x2", add_halves);
  register_handler("ldmatrix", ldmatrix);
  register_handler("stmatrix", stmatrix);
  register_handler("mapa", mapa);
  register_handler("getctarank", ctarank);
  register_handler("isspacep", isspacep);
  register_handler("prefetch", ignore);
}

}  // namespace ptxemu
