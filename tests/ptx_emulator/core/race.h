// Happens-before checking of shared and tensor memory with vector clocks.
//
// Agents are the warps and everything asynchronous: the TMA loads of one mbarrier, the tensor core's in-order pipe, and
// a warp's streams of cp.async, wgmma, bulk stores, st.async and tcgen05.st. An access is a race when an earlier
// conflicting access by another agent isn't ordered before it by an mbarrier phase, a barrier, a commit or a wait.
#pragma once

#include "core.h"

namespace ptxemu {

using Clock = std::vector<u32>;

class Race {
 public:
  enum Kind { kWarp, kTmaOf, kTensorPipe, kCpAsyncOf, kWgmmaOf, kBulkOf, kStAsyncOf, kTmemStoreOf };

  Race(Cluster& cluster);

  u32 warp(const Warp& w) { return agent(kWarp, *w.cta, w.index); }
  u32 agent(Kind kind, const Cta& cta, u32 index);
  // A new epoch of an asynchronous agent that knows what its issuer knew.
  u32 issue(Kind kind, const Cta& cta, u32 index, Warp& issuer);
  u32 now(u32 agent) const { return clocks_[agent][agent]; }
  Clock snapshot(u32 agent) const { return clocks_[agent]; }

  // Accesses. Addresses are offsets in the CTA's shared memory.
  void shared(const Cta& cta, u32 agent, u32 offset, u32 bytes, bool write, i32 line);
  void shared_chunks(const Cta& cta, u32 agent, const std::vector<u32>& offsets, u32 bytes, bool write, i32 line);
  // TMEM: a quarter of the lanes times a column.
  void tmem(const Cta& cta, u32 agent, u32 quarters, u32 column, u32 count, bool write, i32 line);

  // Synchronisation objects: what was released becomes visible to acquirers when the object's phase completes.
  void release(u64 object, u32 agent);
  void release(u64 object, const Clock& clock);
  void complete(u64 object);
  void acquire(u64 object, u32 agent);
  // `agent` learns of everything that `other` did up to its epoch `clock`.
  void join(u32 agent, u32 other, u32 clock);
  void join(u32 agent, const Clock& clock);

  static u64 mbarrier_object(const Cta& cta, u32 offset) { return 1ull << 60 | u64{cta.rank} << 32 | offset; }
  static u64 named_object(const Cta& cta, u32 number) { return 2ull << 60 | u64{cta.rank} << 32 | number; }
  static u64 cluster_object(u64 generation) { return 3ull << 60 | generation; }

 private:
  struct Read {
    u32 agent, clock;
  };
  struct Granule {
    u32 agent = 0, clock = 0;  // last write
    i32 line = 0;
    std::vector<Read> reads;  // since then, one for each agent
  };
  struct Memory {
    std::vector<Granule> granules;
  };
  void access(Granule& g, const char* space, u32 agent, bool write, i32 line);
  void hit(const char* space, const char* verb, u32 agent, i32 line, const char* earlier, u32 other, i32 other_line);
  bool ordered(u32 other, u32 clock, u32 agent) const {
    const Clock& c = clocks_[agent];
    return other == agent || (other < c.size() && c[other] >= clock);
  }

  Cluster& cluster_;
  std::vector<Memory> shared_, tmem_;
  std::unordered_map<u64, u32> ids_;
  std::vector<std::string> names_;
  std::vector<Clock> clocks_;
  std::unordered_map<u64, Clock> pending_, complete_;
};

}  // namespace ptxemu
