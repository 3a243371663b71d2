// The execution core of the PTX emulator: what its files share.
//
// A program is an array of instructions whose operands are byte offsets into a warp's register file; Python decodes PTX
// into it (encode_*.py). Registers are rows of 32 lanes (a predicate is a 32-bit mask), immediates are rows that hold
// the same value 32 times, so a handler never asks what kind an operand is.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptxemu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr u32 kLanes = 32;
constexpr u32 kFull = 0xFFFFFFFFu;
// Generic addresses of the spaces that aren't global memory. Host pointers have at most 47 bits.
constexpr u64 kParamWindow = 0x0F00000000000000, kLocalWindow = 0x0E00000000000000, kSharedWindow = 0x0D00000000000000;
// The driver keeps the first KiB of shared memory (every cubin's .nv.shared has it), so that address 0 is never valid.
constexpr u32 kReservedShared = 1024;
// A shared address carries its CTA's rank in the cluster from this bit on. CUTLASS clears bit 24 to name the leader of
// a CTA pair (Sm100MmaPeerBitMask), so hardware has it there.
constexpr u32 kRankShift = 24;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Deadlock : Error {
  using Error::Error;
};

struct Warp;
struct Cta;
struct Cluster;
struct Machine;
class Race;

enum class Status { kNext, kJumped, kBlocked, kTurnOver };

struct Instruction;
using Handler = Status (*)(Warp&, const Instruction&);

struct Instruction {
  Handler run;
  const i32* x;  // operands
  i64 imm;       // whatever else a handler wants to know
  i32 guard;     // offset of the predicate, or -1
  u16 negated;   // the guard is @!p
  u16 count;     // of operands
  i32 line;      // in the PTX file
};

// What Python hands over; `handler` is an index into the registry.
struct EncodedInstruction {
  i32 handler, guard, negated, line, first, count;
  i64 imm;
};

// A special register or address that a warp's register file holds as a row, filled when the warp starts.
struct Special {
  i32 kind, offset;
  i64 value;
};

struct Program {
  std::vector<Instruction> code;
  std::vector<i32> operands;
  std::vector<u8> image;  // register file of a new warp: immediates in place, everything else poison
  std::vector<Special> specials;
  std::vector<u64> hits;     // of each basic block
  std::set<i32> real_waits;  // lines of mbarrier waits that came through because a phase had completed
  u32 local_bytes = 0, shared_bytes = 0;
  std::vector<std::unique_ptr<u8[]>> spare;  // register files of warps that have ended, to be used again
};

struct Range {
  u64 base, size;
  u64 writable;
};

// Fields are set by core.py; the order is the layout.
struct LaunchSpec {
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_shared;
  const u8* params;
  u64 param_bytes;
  const Range* ranges;
  u64 num_ranges;
  i32 policy;   // Policy::Mode
  u32 starved;  // bit set of AsyncClass, for kLate
  u64 seed;
  i32 race, max_resident;
  u64 max_instructions;
  u64 instructions, matrix_instructions, ctas;  // results
};

// ---- asynchronous operations ----

enum AsyncClass { kCpAsync, kTma, kBulkStore, kWgmma, kTcgen05, kTmemStore, kStAsync, kAsyncClasses };

struct AsyncOp {
  std::function<void()> complete;
  AsyncClass kind;
  u32 lanes;
  u64* parked;  // counter of the cluster's operations in flight
  bool done = false;
  void run() {
    if (done) return;
    done = true;
    --*parked;
    complete();
  }
};
using AsyncPtr = std::shared_ptr<AsyncOp>;

// Groups of one kind (cp.async, bulk stores, wgmma) of one warp. A group belongs to the lanes that committed it.
struct Stream {
  struct Group {
    u32 lanes;
    std::vector<AsyncPtr> ops;
    u32 clock;  // of the stream's agent in the race detector, at the commit
  };
  std::vector<AsyncPtr> open;
  std::vector<Group> groups;
};

struct Policy {
  enum Mode { kEager, kLate, kRandom };
  Mode mode = kEager;
  u32 starved = 0;
  std::mt19937_64 random;
  bool chance(double p) { return std::uniform_real_distribution<double>()(random) < p; }
  bool defers(AsyncClass kind) const { return mode == kRandom || (mode == kLate && (starved >> kind & 1)); }
};

// ---- barriers ----

struct Mbarrier {
  u32 count = 0, pending = 0, phase = 0;
  i64 bytes = 0;   // expected and not yet arrived
  u64 phases = 0;  // completed
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0;
  u64 generation = 0;
};

struct Wait {
  enum Kind { kNone, kMbarrier, kNamed, kCluster } kind = kNone;
  u32 address = 0, parity = 0;  // address: with rank; or the barrier's number
  u64 generation = 0;
};

// ---- the machine ----

struct Frame {
  i32 pc, reconverge;
  u32 mask;
};

struct Warp {
  Cta* cta;
  u32 index;
  Program* program;
  u8* registers;
  u32 valid, alive, mask = 0;  // lanes that exist, that have not exited, that execute the current instruction
  std::vector<Frame> stack;
  Wait wait;
  bool resumed = false;    // the instruction that blocked is executed again
  bool timed_out = false;  // let one try_wait fail
  bool done = false;
  i32 line = 0;
  u64 instructions = 0;
  u64 cluster_generation = 0;    // in which this warp arrived at the cluster barrier last
  bool at_cluster = false;       // arrived there in the current generation
  std::vector<u32> fence_clock;  // race detector: what the last fence made releasable
  std::vector<u8> local;
  Stream cp_async, bulk, wgmma;
  std::vector<AsyncPtr> tmem_stores;
  // 16-byte granules of shared memory that this warp wrote through the generic proxy since its last proxy fence
  std::vector<std::pair<Cta*, u32>> unfenced;
  std::unique_ptr<u8[]> storage;

  Warp(Cta* cta, u32 index, Program* program);
  ~Warp();
  void run(u64 blocks);
  i32 pc() const { return stack.back().pc; }
  u16 tag() const;  // names the warp in its cluster; not 0
  // Fails unless all lanes that have not exited execute this instruction together.
  void require_converged(const char* what) const {
    if (mask != alive) fail("%s executed by a diverged warp (lanes %08x of %08x)", what, mask, alive);
  }
};

struct Cta {
  Cluster* cluster;
  Machine* machine;
  Program* program;
  u32 rank, id[3], num_threads;
  std::vector<u8> shared;     // from address 0, reserved part included
  std::vector<u16> unfenced;  // per 16 bytes: Warp::tag() of the last unfenced generic write, or 0
  std::unordered_map<u32, Mbarrier> mbarriers;
  std::array<NamedBarrier, 16> named;
  std::vector<AsyncPtr> tma;    // not ordered among themselves
  std::deque<AsyncPtr> tensor;  // the tensor core's in-order pipe
  std::vector<u32> tmem;        // [128 lanes][512 columns], allocated with the first tcgen05.alloc
  std::vector<std::pair<u32, u32>> tmem_allocations;
  bool tmem_relinquished = false;
  std::vector<std::unique_ptr<Warp>> warps;
  u32 live = 0;

  Cta(Cluster* cluster, u32 rank, const u32* id);
  Mbarrier& mbarrier(u32 address);
  void arrive(u32 address, u32 count, i64 expect_bytes);
  void complete_bytes(u32 address, i64 bytes);
  void settle(u32 address, Mbarrier& barrier);
  // Offset of a shared address that must lie in this CTA.
  u32 offset(u32 address, u32 bytes, const char* what) const;
  void leave();   // the last warp exits
  void finish();  // the cluster ends
};

struct Cluster {
  Machine* machine;
  std::vector<std::unique_ptr<Cta>> ctas;
  u64 generation = 0;  // of the cluster barrier
  u64 parked = 0;      // asynchronous operations in flight
  std::unique_ptr<Race> race;

  explicit Cluster(Machine* machine);
  ~Cluster();
  Cta& owner(u32 address);
  // Ends the cluster barrier's phase if every warp that has not exited has arrived.
  void settle();
  bool done() const;
  // Runs the operation now or leaves it to `queue`.
  template <class Queue>
  AsyncPtr submit(Queue& queue, AsyncClass kind, u32 lanes, std::function<void()> complete);
};

struct Machine {
  Program* program;
  LaunchSpec* spec;
  Policy policy;
  std::vector<std::unique_ptr<Cluster>> resident;
  u64 next_cluster = 0, num_clusters = 0;
  u64 progress = 0;  // changes whenever something happens that another warp may see
  std::set<std::string> reports;
  std::vector<Range> ranges;
  size_t last_range = 0;

  Machine(Program* program, LaunchSpec* spec);
  void run();
  void report(const char* format, ...) __attribute__((format(printf, 2, 3)));
  // Host pointer of a global access; fails outside the ranges given.
  u8* global(u64 address, u64 bytes, bool write);

 private:
  void admit();
  bool complete_one();
  bool ready(const Warp& warp) const;
  void run_warp(Warp& warp, u64 blocks);
  [[noreturn]] void deadlock(const char* why);
};

template <class Queue>
AsyncPtr Cluster::submit(Queue& queue, AsyncClass kind, u32 lanes, std::function<void()> complete) {
  auto op = std::make_shared<AsyncOp>();
  op->complete = std::move(complete), op->kind = kind, op->lanes = lanes, op->parked = &parked;
  ++parked;
  if (machine->policy.defers(kind))
    queue.push_back(op);
  else
    op->run();
  return op;
}

// ---- handlers ----

void register_handler(const std::string& name, Handler handler);
void register_alu();
void register_float();
void register_convert();
void register_warp();
void register_memory();
void register_barriers();
void register_copies();
void register_mma();
void register_wgmma();
void register_tcgen05();
void register_tensor_memory();

template <class T>
T* row(Warp& w, i32 offset) {
  return reinterpret_cast<T*>(w.registers + offset);
}
inline u32& predicate(Warp& w, i32 offset) { return *reinterpret_cast<u32*>(w.registers + offset); }

// d[lane] = f(lane) in the active lanes. Rows are the same or disjoint, so lanes are independent.
template <class T, class F>
inline Status each(Warp& w, i32 offset, F f) {
  T* d = row<T>(w, offset);
  if (w.mask == kFull) {
#pragma GCC ivdep
    for (u32 l = 0; l < kLanes; ++l) d[l] = f(l);
  } else {
    const u32 m = w.mask;
    for (u32 l = 0; l < kLanes; ++l)
      if (m >> l & 1) d[l] = f(l);
  }
  return Status::kNext;
}

template <class F>
inline Status each_predicate(Warp& w, i32 offset, F f) {
  u32 bits = 0;
  for (u32 l = 0; l < kLanes; ++l) bits |= static_cast<u32>(f(l) ? 1 : 0) << l;
  u32& d = predicate(w, offset);
  d = (d & ~w.mask) | (bits & w.mask);
  return Status::kNext;
}

template <class F>
inline void for_lanes(u32 mask, F f) {
  for (; mask; mask &= mask - 1) f(static_cast<u32>(__builtin_ctz(mask)));
}
inline u32 first_lane(const Warp& w) { return static_cast<u32>(__builtin_ctz(w.mask)); }

// An address operand is three numbers: row, displacement, and whether the row is 64 bits wide.
struct Addresses {
  u64 at[kLanes];
  Addresses(Warp& w, const i32* x) {
    const i64 displacement = x[1];
    if (x[2]) {
      const u64* base = row<u64>(w, x[0]);
      for (u32 l = 0; l < kLanes; ++l) at[l] = base[l] + static_cast<u64>(displacement);
    } else {
      const u32* base = row<u32>(w, x[0]);
      for (u32 l = 0; l < kLanes; ++l) at[l] = base[l] + static_cast<u32>(displacement);
    }
  }
  u64 operator[](u32 lane) const { return at[lane]; }
};
inline u64 address_at(Warp& w, const i32* x, u32 lane) {
  return x[2] ? row<u64>(w, x[0])[lane] + static_cast<i64>(x[1])
              : static_cast<u64>(row<u32>(w, x[0])[lane] + static_cast<u32>(x[1]));
}

// Every lane's value of an operand that the ISA wants uniform.
template <class T>
T uniform(Warp& w, i32 offset, const char* what) {
  const T* r = row<T>(w, offset);
  const T value = r[first_lane(w)];
  for_lanes(w.mask, [&](u32 l) {
    if (r[l] != value) fail("%s: the operand differs between lanes", what);
  });
  return value;
}

}  // namespace ptxemu
