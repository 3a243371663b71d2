// mbarriers, named barriers, the cluster barrier and fences.
#include "memory.h"

namespace ptxemu {
namespace {

Race* detector(Warp& w) { return w.cta->cluster->race.get(); }

// x: address, count
Status mbarrier_init(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  const u32* count = row<u32>(w, in.x[3]);
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, false, "mbarrier.init");
    if (p.offset % 8) fail("mbarrier.init: misaligned address");
    if (count[l] == 0 || count[l] >= 1u << 20) fail("mbarrier.init: count %u is not in 1 to 2^20 - 1", count[l]);
    Mbarrier& b = p.cta->mbarriers[p.offset];
    b = Mbarrier();
    b.count = b.pending = count[l];
    ++w.cta->machine->progress;
  });
  return Status::kNext;
}
Status mbarrier_invalidate(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, false, "mbarrier.inval");
    p.cta->mbarrier(static_cast<u32>(a[l]));
    p.cta->mbarriers.erase(p.offset);
  });
  return Status::kNext;
}

// x: address, count (-1: one), bytes expected (-1: none), state (-1: not wanted). imm: bit 0 the barrier may be in
// another CTA, bit 1 drop (later phases expect one arrival fewer).
Status mbarrier_arrive(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  u64 state[kLanes] = {};
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, in.imm & 1, "mbarrier.arrive");
    const u32 address = static_cast<u32>(a[l]);
    Mbarrier& b = p.cta->mbarrier(address);
    state[l] = b.phase;
    if (in.imm & 2) --b.count;
    if (Race* race = detector(w)) race->release(Race::mbarrier_object(*p.cta, p.offset), race->warp(w));
    p.cta->arrive(address, in.x[3] < 0 ? 1 : row<u32>(w, in.x[3])[l], in.x[4] < 0 ? 0 : row<u32>(w, in.x[4])[l]);
  });
  return in.x[5] < 0 ? Status::kNext : each<u64>(w, in.x[5], [&](u32 l) { return state[l]; });
}
// x: address, bytes
Status mbarrier_expect(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, true, "mbarrier.expect_tx");
    p.cta->mbarrier(static_cast<u32>(a[l])).bytes += row<u32>(w, in.x[3])[l];
  });
  return Status::kNext;
}
Status mbarrier_complete(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x);
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, true, "mbarrier.complete_tx");
    p.cta->complete_bytes(static_cast<u32>(a[l]), row<u32>(w, in.x[3])[l]);
  });
  return Status::kNext;
}

// x: p, address, parity or state. imm: bit 0 may suspend (try_wait), bit 1 the operand is a 64-bit state.
// A wait for parity P succeeds once the phase of that parity has completed, that is when the current one's differs.
Status mbarrier_wait(Warp& w, const Instruction& in) {
  const Addresses a(w, in.x + 1);
  u32 passed = 0, missing = kLanes;
  for_lanes(w.mask, [&](u32 l) {
    const SharedPlace p = shared_place(w, a[l], 8, false, "mbarrier wait");
    const u32 parity = in.imm & 2 ? row<u64>(w, in.x[4])[l] & 1 : row<u32>(w, in.x[4])[l] & 1;
    const Mbarrier& b = p.cta->mbarrier(static_cast<u32>(a[l]));
    if (b.phase != parity) {
      passed |= 1u << l;
      if (b.phases) w.program->real_waits.insert(w.line);
    } else if (missing == kLanes) {
      missing = l;
    }
  });
  // Hardware's try_wait may give up at any time. Under random schedules it does: seldom with even seeds, nearly always
  // with odd ones, so that whole groups of warps go the way of a failed peek.
  const Machine& machine = *w.cta->machine;
  const bool impatient =
      w.timed_out || !(in.imm & 1) ||
      (machine.policy.mode == Policy::kRandom && w.cta->machine->policy.chance(machine.spec->seed % 2 ? 0.97 : 0.3));
  if (missing < kLanes && !impatient) {
    const u32 parity = in.imm & 2 ? row<u64>(w, in.x[4])[missing] & 1 : row<u32>(w, in.x[4])[missing] & 1;
    w.wait = {Wait::kMbarrier, static_cast<u32>(a[missing]), parity, 0};
    return Status::kBlocked;
  }
  if (missing < kLanes) w.timed_out = false;
  if (Race* race = detector(w))
    for_lanes(passed, [&](u32 l) {
      race->acquire(Race::mbarrier_object(*w.cta, static_cast<u32>(a[l]) & 0xFFFFFF), race->warp(w));
    });
  return each_predicate(w, in.x[0], [=](u32 l) { return passed >> l & 1; });
}

// ---- named barriers ----

// x: number, threads (-1: all of the CTA). imm: arrive only
Status named_barrier(Warp& w, const Instruction& in) {
  w.require_converged("a barrier of the CTA");
  const u32 number = uniform<u32>(w, in.x[0], "barrier number");
  if (number > 15) fail("barrier %u: there are 16", number);
  NamedBarrier& b = w.cta->named[number];
  Race* race = detector(w);
  const u64 object = Race::named_object(*w.cta, number);
  if (w.wait.kind == Wait::kNamed) {
    if (b.generation == w.wait.generation) return Status::kBlocked;
    if (race) race->acquire(object, race->warp(w));
    return Status::kNext;
  }
  const u32 all = (w.cta->num_threads + 31) / 32 * 32;
  const u32 threads = in.x[1] < 0 ? all : uniform<u32>(w, in.x[1], "barrier threads");
  if (threads % 32 || threads == 0 || threads > all) fail("barrier %u for %u threads of %u", number, threads, all);
  if (b.arrived && b.expected != threads)
    fail("barrier %u: %u threads wanted here, %u by those that wait", number, threads, b.expected);
  if (race) race->release(object, race->warp(w));
  ++w.cta->machine->progress;
  b.expected = threads;
  b.arrived += 32;
  if (b.arrived < threads) {
    if (in.imm) return Status::kNext;
    w.wait = {Wait::kNamed, number, 0, b.generation};
    return Status::kBlocked;
  }
  b.arrived = 0, ++b.generation;
  if (race) {
    race->complete(object);
    if (!in.imm) race->acquire(object, race->warp(w));
  }
  return Status::kNext;
}

// ---- the cluster barrier ----

// imm: relaxed, which orders only what a fence before it has released
Status cluster_arrive(Warp& w, const Instruction& in) {
  w.require_converged("barrier.cluster.arrive");
  if (w.at_cluster) fail("barrier.cluster.arrive twice without a wait");
  w.at_cluster = true;
  w.cluster_generation = w.cta->cluster->generation;
  if (Race* race = detector(w)) {
    const u64 object = Race::cluster_object(w.cluster_generation);
    if (!in.imm)
      race->release(object, race->warp(w));
    else
      race->release(object, w.fence_clock);
  }
  ++w.cta->machine->progress;
  w.cta->cluster->settle();
  return Status::kNext;
}
Status cluster_wait(Warp& w, const Instruction&) {
  w.require_converged("barrier.cluster.wait");
  if (w.cta->cluster->generation == w.cluster_generation) {
    if (!w.at_cluster) fail("barrier.cluster.wait without an arrive");
    w.wait = {Wait::kCluster, 0, 0, w.cluster_generation};
    return Status::kBlocked;
  }
  if (Race* race = detector(w)) race->acquire(Race::cluster_object(w.cluster_generation), race->warp(w));
  return Status::kNext;
}

// ---- fences ----

Status fence(Warp& w, const Instruction&) {
  if (Race* race = detector(w)) w.fence_clock = race->snapshot(race->warp(w));
  return Status::kNext;
}
Status fence_proxy_async(Warp& w, const Instruction&) {
  for (auto [cta, granule] : w.unfenced)
    if (cta->unfenced[granule] == w.tag()) cta->unfenced[granule] = 0;
  w.unfenced.clear();
  return Status::kNext;
}

}  // namespace

void register_barriers() {
  register_handler("mbarrier.init", mbarrier_init);
  register_handler("mbarrier.inval", mbarrier_invalidate);
  register_handler("mbarrier.arrive", mbarrier_arrive);
  register_handler("mbarrier.expect_tx", mbarrier_expect);
  register_handler("mbarrier.complete_tx", mbarrier_complete);
  register_handler("mbarrier.wait", mbarrier_wait);
  register_handler("barrier", named_barrier);
  register_handler("cluster.arrive", cluster_arrive);
  register_handler("cluster.wait", cluster_wait);
  register_handler("fence", fence);
  register_handler("fence.proxy.async", fence_proxy_async);
}

}  // namespace ptxemu
