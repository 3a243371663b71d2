// Warps, CTAs, clusters and the scheduler.
#include <algorithm>
#include <cstdarg>

#include "core.h"
#include "race.h"

namespace ptxemu {
namespace {

std::string formatted(const char* format, va_list arguments) {
  char text[1024];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

// In the order of AsyncClass.
const char* kind_name(AsyncClass kind) {
  static const char* names[] = {"cp.async", "TMA", "bulk store", "wgmma", "tcgen05", "tcgen05.st", "st.async"};
  return names[kind];
}

constexpr u64 kSlice = 20000;  // basic blocks that an eager warp runs before the next warp's turn
// Rounds without any visible effect after which spinning warps are called hung; random schedules have short turns.
constexpr int kIdleRounds = 400, kIdleRandomRounds = 20000;

enum SpecialKind {
  kTidX,
  kTidY,
  kTidZ,
  kLaneId,
  kLaneMaskLt,
  kLaneMaskLe,
  kLaneMaskGt,
  kLaneMaskGe,
  kLaneMaskEq,
  kWarpId,
  kNumWarps,
  kNtid,
  kCtaid = kNtid + 3,
  kNctaid = kCtaid + 3,
  kClusterId = kNctaid + 3,
  kNumClusters = kClusterId + 3,
  kClusterCtaid = kNumClusters + 3,
  kClusterNctaid = kClusterCtaid + 3,
  kClusterRank = kClusterNctaid + 3,
  kClusterSize,
  kSharedAddress,
  kTotalShared,
  kDynamicShared,
  kSmId,
};

u32 special_value(const Warp& w, i32 kind, i64 value, u32 lane) {
  const Cta& c = *w.cta;
  const LaunchSpec& s = *c.machine->spec;
  const u32 t = w.index * kLanes + lane, rank[3] = {c.rank % s.cluster[0], c.rank / s.cluster[0] % s.cluster[1],
                                                    c.rank / (s.cluster[0] * s.cluster[1])};
  switch (kind) {
    case kTidX:
      return t % s.block[0];
    case kTidY:
      return t / s.block[0] % s.block[1];
    case kTidZ:
      return t / (s.block[0] * s.block[1]);
    case kLaneId:
      return lane;
    case kLaneMaskLt:
      return (1u << lane) - 1;
    case kLaneMaskLe:
      return (2u << lane) - 1;
    case kLaneMaskGt:
      return ~((2u << lane) - 1);
    case kLaneMaskGe:
      return ~((1u << lane) - 1);
    case kLaneMaskEq:
      return 1u << lane;
    case kWarpId:
      return w.index;
    case kNumWarps:
      return (c.num_threads + 31) / 32;
    case kClusterRank:
      return c.rank;
    case kClusterSize:
      return s.cluster[0] * s.cluster[1] * s.cluster[2];
    case kSharedAddress:
      return (c.rank << kRankShift) + static_cast<u32>(value);
    case kTotalShared:
      return static_cast<u32>(c.shared.size());
    case kDynamicShared:
      return s.dynamic_shared;
    case kSmId:
      return static_cast<u32>(c.machine->next_cluster % 132);
  }
  const auto axis = [&](i32 first) { return kind - first; };
  if (kind < kCtaid) return s.block[axis(kNtid)];
  if (kind < kNctaid) return c.id[axis(kCtaid)];
  if (kind < kClusterId) return s.grid[axis(kNctaid)];
  if (kind < kNumClusters) return c.id[axis(kClusterId)] / s.cluster[axis(kClusterId)];
  if (kind < kClusterCtaid) return s.grid[axis(kNumClusters)] / s.cluster[axis(kNumClusters)];
  if (kind < kClusterNctaid) return rank[axis(kClusterCtaid)];
  return s.cluster[axis(kClusterNctaid)];
}

}  // namespace

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = formatted(format, arguments);
  va_end(arguments);
  throw Error(text);
}

// ---- warp ----

Warp::Warp(Cta* cta, u32 index, Program* program) : cta(cta), index(index), program(program) {
  const u32 left = cta->num_threads - index * kLanes;
  valid = alive = left >= kLanes ? kFull : (1u << left) - 1;
  stack.push_back({0, -1, valid});
  if (program->spare.empty()) {
    storage.reset(new u8[program->image.size() + 64]);
  } else {
    storage = std::move(program->spare.back());
    program->spare.pop_back();
  }
  registers = storage.get() + (64 - reinterpret_cast<std::uintptr_t>(storage.get()) % 64) % 64;
  std::memcpy(registers, program->image.data(), program->image.size());
  for (const Special& s : program->specials)
    for (u32 l = 0; l < kLanes; ++l) row<u32>(*this, s.offset)[l] = special_value(*this, s.kind, s.value, l);
  local.assign(size_t{program->local_bytes} * kLanes, 0xFF);
}

u16 Warp::tag() const { return static_cast<u16>(1 + cta->rank * 64 + index); }

Warp::~Warp() {
  if (program->spare.size() < 256) program->spare.push_back(std::move(storage));
}

// Executes up to `blocks` basic blocks; stops early when the warp blocks or exits.
void Warp::run(u64 blocks) {
  const Instruction* code = program->code.data();
  u64 executed = 0, entered = 0;
  while (!done) {
    Frame& frame = stack.back();
    const Instruction& in = code[frame.pc];
    mask = frame.mask;
    line = in.line;
    if (in.guard >= 0) {
      const u32 p = predicate(*this, in.guard);
      mask &= in.negated ? ~p : p;
      if (mask == 0) {
        ++frame.pc, ++executed;
        continue;
      }
    }
    const Status status = in.run(*this, in);
    if (status == Status::kBlocked) break;
    wait.kind = Wait::kNone;
    resumed = false;
    ++executed;
    if (status == Status::kNext || status == Status::kTurnOver) ++stack.back().pc;
    if (status == Status::kTurnOver) break;
    if (status == Status::kJumped && ++entered > blocks) break;
  }
  instructions += executed;
}

// ---- CTA ----

Cta::Cta(Cluster* cluster, u32 rank, const u32* id)
    : cluster(cluster), machine(cluster->machine), program(machine->program), rank(rank), id{id[0], id[1], id[2]} {
  const LaunchSpec& s = *machine->spec;
  num_threads = s.block[0] * s.block[1] * s.block[2];
  const u32 bytes = (program->shared_bytes + s.dynamic_shared + 1023) / 1024 * 1024;
  shared.assign(bytes, 0xFF);
  unfenced.assign(bytes / 16, 0);
  for (u32 i = 0; i * kLanes < num_threads; ++i) warps.push_back(std::make_unique<Warp>(this, i, program));
  live = static_cast<u32>(warps.size());
}

u32 Cta::offset(u32 address, u32 bytes, const char* what) const {
  const u32 at = address & ((1u << kRankShift) - 1);
  if (address >> kRankShift != rank || at < kReservedShared || at + bytes > shared.size())
    fail("%s outside shared memory: address %#x, %u bytes; CTA %u has %u bytes from %#x", what, address, bytes, rank,
         static_cast<u32>(shared.size()) - kReservedShared, (rank << kRankShift) + kReservedShared);
  return at;
}

Mbarrier& Cta::mbarrier(u32 address) {
  const u32 at = offset(address, 8, "mbarrier");
  auto found = mbarriers.find(at);
  if (found == mbarriers.end()) fail("mbarrier at shared +%u used before its init", at - kReservedShared);
  return found->second;
}

void Cta::settle(u32 address, Mbarrier& b) {
  ++machine->progress;
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1, ++b.phases, b.pending = b.count;
  if (cluster->race) cluster->race->complete(Race::mbarrier_object(*this, offset(address, 8, "mbarrier")));
}

void Cta::arrive(u32 address, u32 count, i64 expect_bytes) {
  Mbarrier& b = mbarrier(address);
  b.bytes += expect_bytes;
  if (count > b.pending)
    fail("mbarrier at shared +%u: %u more arrivals in a phase of %u", offset(address, 8, "") - kReservedShared, count,
         b.count);
  b.pending -= count;
  settle(address, b);
}

void Cta::complete_bytes(u32 address, i64 bytes) {
  Mbarrier& b = mbarrier(address);
  b.bytes -= bytes;
  settle(address, b);
}

// What still uses this CTA's shared memory when it may already belong to another one. Not cp.async, which hardware
// drains, and not st.async, whose data come from registers.
void Cta::leave() {
  const auto check = [&](const auto& list) {
    for (const AsyncPtr& op : list)
      if (!op->done && op->lanes && op->kind != kStAsync)
        machine->report("the CTA exits before its asynchronous operation (%s) is complete", kind_name(op->kind));
  };
  check(tma);
  check(tensor);
  for (auto& w : warps)
    for (Stream* s : {&w->bulk, &w->wgmma}) {
      check(s->open);
      for (auto& group : s->groups) check(group.ops);
    }
}

void Cta::finish() {
  const auto drain = [](auto& list) {
    for (auto& op : list) op->run();
    list.clear();
  };
  for (auto& w : warps) {
    for (Stream* s : {&w->cp_async, &w->bulk, &w->wgmma}) {
      for (auto& group : s->groups) drain(group.ops);
      drain(s->open);
    }
    drain(w->tmem_stores);
  }
  drain(tma);
  drain(tensor);
  if (!tmem_allocations.empty()) machine->report("tensor memory not deallocated at exit");
  for (const auto& [at, b] : mbarriers)
    if (b.bytes < 0)
      machine->report("mbarrier at shared +%u received %lld bytes more than announced", at - kReservedShared,
                      static_cast<long long>(-b.bytes));
}

Cluster::Cluster(Machine* machine) : machine(machine) {}
Cluster::~Cluster() = default;

void Cluster::settle() {
  bool any = false;
  for (auto& c : ctas)
    for (auto& w : c->warps) {
      if (!w->done && !w->at_cluster) return;
      any |= w->at_cluster;
    }
  if (!any) return;
  if (race) race->complete(Race::cluster_object(generation));
  for (auto& c : ctas)
    for (auto& w : c->warps) w->at_cluster = false;
  ++generation, ++machine->progress;
}

Cta& Cluster::owner(u32 address) {
  const u32 rank = address >> kRankShift;
  if (rank >= ctas.size()) fail("shared address %#x names CTA %u of a cluster of %zu", address, rank, ctas.size());
  return *ctas[rank];
}

bool Cluster::done() const {
  return std::all_of(ctas.begin(), ctas.end(), [](const auto& c) { return c->live == 0; });
}

// ---- machine ----

Machine::Machine(Program* program, LaunchSpec* spec) : program(program), spec(spec) {
  num_clusters = 1;
  for (int i = 0; i < 3; ++i) {
    if (spec->cluster[i] == 0 || spec->grid[i] % spec->cluster[i]) fail("the grid isn't a multiple of the cluster");
    num_clusters *= spec->grid[i] / spec->cluster[i];
  }
  policy.mode = static_cast<Policy::Mode>(spec->policy);
  policy.starved = spec->starved;
  policy.random.seed(spec->seed);
  ranges.assign(spec->ranges, spec->ranges + spec->num_ranges);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.base < b.base; });
}

void Machine::report(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (reports.size() < 200) reports.insert(formatted(format, arguments));
  va_end(arguments);
}

u8* Machine::global(u64 address, u64 bytes, bool write) {
  const auto inside = [&](const Range& r) { return address >= r.base && address + bytes <= r.base + r.size; };
  const auto accepted = [&](const Range& r) {
    if (write && !r.writable)
      fail("global write to %#llx, in a tensor that isn't an output", (unsigned long long)address);
    return reinterpret_cast<u8*>(address);
  };
  if (last_range < ranges.size() && inside(ranges[last_range]) && (ranges[last_range].writable || !write))
    return reinterpret_cast<u8*>(address);
  bool found = false;
  // Ranges may overlap (views of one tensor); any that holds the access will do, a writable one first.
  for (size_t i = 0; i < ranges.size() && ranges[i].base <= address; ++i)
    if (inside(ranges[i])) {
      last_range = i, found = true;
      if (!write || ranges[i].writable) break;
    }
  if (found) return accepted(ranges[last_range]);
  std::string nearest;
  for (const Range& r : ranges)
    if (r.base <= address)
      nearest = ", " + std::to_string(address - r.base) + " bytes past the start of a tensor of " +
                std::to_string(r.size) + " bytes";
  fail("global %s of %llu bytes at %#llx outside the tensors given%s", write ? "write" : "read",
       (unsigned long long)bytes, (unsigned long long)address, nearest.c_str());
}

void Machine::admit() {
  auto cluster = std::make_unique<Cluster>(this);
  const u32* n = spec->cluster;
  const u32 size[3] = {spec->grid[0] / n[0], spec->grid[1] / n[1], spec->grid[2] / n[2]};
  const u64 c = next_cluster++;
  const u32 first[3] = {static_cast<u32>(c % size[0]) * n[0], static_cast<u32>(c / size[0] % size[1]) * n[1],
                        static_cast<u32>(c / (u64{size[0]} * size[1])) * n[2]};
  for (u32 r = 0; r < n[0] * n[1] * n[2]; ++r) {
    const u32 id[3] = {first[0] + r % n[0], first[1] + r / n[0] % n[1], first[2] + r / (n[0] * n[1])};
    cluster->ctas.push_back(std::make_unique<Cta>(cluster.get(), r, id));
  }
  if (spec->race) cluster->race = std::make_unique<Race>(*cluster);
  resident.push_back(std::move(cluster));
  spec->ctas += n[0] * n[1] * n[2];
}

bool Machine::ready(const Warp& w) const {
  switch (w.wait.kind) {
    case Wait::kNone:
      return true;
    case Wait::kMbarrier:
      return w.cta->mbarrier(w.wait.address).phase != w.wait.parity;
    case Wait::kNamed:
      return w.cta->named[w.wait.address].generation != w.wait.generation;
    case Wait::kCluster:
      return w.cta->cluster->generation != w.wait.generation;
  }
  return true;
}

void Machine::run_warp(Warp& w, u64 blocks) {
  const u64 before = w.instructions;
  try {
    w.run(blocks);
  } catch (const Error& error) {
    const u32* id = w.cta->id;
    throw Error("CTA (" + std::to_string(id[0]) + ", " + std::to_string(id[1]) + ", " + std::to_string(id[2]) +
                ") warp " + std::to_string(w.index) + " PTX line " + std::to_string(w.line) + ": " + error.what());
  }
  spec->instructions += w.instructions - before;
  if (spec->instructions > spec->max_instructions) deadlock("the limit of instructions is exceeded; this hangs");
}

// Completes one parked operation, chosen at random. Returns false if there was none.
bool Machine::complete_one() {
  std::vector<Cluster*> busy;
  for (auto& cluster : resident)
    if (cluster->parked) busy.push_back(cluster.get());
  if (busy.empty()) return false;
  // Operations of one stream complete in order; the oldest of each stream is a candidate.
  struct Candidate {
    std::vector<AsyncPtr>* list;
    std::deque<AsyncPtr>* pipe;
    size_t index;
  };
  std::vector<Candidate> candidates;
  const auto oldest = [&](std::vector<AsyncPtr>& list) {
    while (!list.empty() && list.front()->done) list.erase(list.begin());
    if (!list.empty()) candidates.push_back({&list, nullptr, 0});
    return !list.empty();
  };
  for (auto& c : busy[policy.random() % busy.size()]->ctas) {
    for (size_t i = 0; i < c->tma.size(); ++i) candidates.push_back({&c->tma, nullptr, i});
    while (!c->tensor.empty() && c->tensor.front()->done) c->tensor.pop_front();
    if (!c->tensor.empty()) candidates.push_back({nullptr, &c->tensor, 0});
    for (auto& w : c->warps) {
      for (Stream* s : {&w->cp_async, &w->bulk, &w->wgmma}) {
        bool any = false;
        for (auto& group : s->groups)
          if ((any = oldest(group.ops))) break;
        if (!any) oldest(s->open);
      }
      oldest(w->tmem_stores);
    }
  }
  if (candidates.empty()) return false;
  const Candidate c = candidates[policy.random() % candidates.size()];
  AsyncPtr op;
  if (c.pipe) {
    op = c.pipe->front();
    c.pipe->pop_front();
  } else {
    op = (*c.list)[c.index];
    c.list->erase(c.list->begin() + static_cast<std::ptrdiff_t>(c.index));
  }
  op->run();
  ++progress;
  return true;
}

void Machine::run() {
  const bool random = policy.mode == Policy::kRandom;
  const u64 most =
      std::max<u64>(1, static_cast<u64>(spec->max_resident) / (spec->cluster[0] * spec->cluster[1] * spec->cluster[2]));
  u64 last_progress = ~0ull;
  int idle = 0;
  const int idle_rounds = random ? kIdleRandomRounds : kIdleRounds;
  std::vector<Warp*> order;
  const auto can_admit = [&] { return next_cluster < num_clusters && resident.size() < most; };
  while (next_cluster < num_clusters || !resident.empty()) {
    if (resident.empty() || (random && can_admit() && policy.chance(0.5))) admit();
    bool ran = false, spun = false;
    order.clear();
    for (auto& cluster : resident)
      for (auto& c : cluster->ctas)
        for (auto& w : c->warps)
          if (!w->done) order.push_back(w.get());
    if (random) std::shuffle(order.begin(), order.end(), policy.random);
    for (Warp* w : order) {
      if (!ready(*w)) continue;
      static constexpr u64 kSlices[] = {1, 3, 10, 100};
      const u64 slice = random ? kSlices[policy.random() % 4] : kSlice;
      const u64 before = w->instructions;
      run_warp(*w, slice);
      if (w->instructions != before || w->done) ran = true;
      if (!w->done && w->wait.kind == Wait::kNone) spun = true;
      while (random && policy.chance(0.3) && complete_one()) {
      }
    }
    for (auto& cluster : resident)
      if (cluster->done())
        for (auto& c : cluster->ctas) c->finish();
    resident.erase(std::remove_if(resident.begin(), resident.end(), [](const auto& c) { return c->done(); }),
                   resident.end());
    idle = progress == last_progress ? idle + 1 : 0;
    last_progress = progress;
    if (ran && !spun) continue;
    // Nothing runs, or somebody spins: it may wait for a CTA that hasn't started or for an operation that is parked.
    if (resident.empty()) continue;
    if (can_admit() && (spun || !ran)) {
      if (!ran || idle > 2 || !random) admit();
      continue;
    }
    if (ran && idle < idle_rounds) {
      if (idle > 8) complete_one();
      continue;
    }
    if (!ran && complete_one()) continue;
    if (idle > (ran ? idle_rounds : 8)) deadlock(ran ? "warps spin and nothing changes" : "no warp can run");
    // Hardware lets try_wait give up after a while, and kernels use it to peek: let one fail.
    for (auto& cluster : resident)
      for (auto& c : cluster->ctas)
        for (auto& w : c->warps)
          if (w->wait.kind == Wait::kMbarrier) w->timed_out = true, w->wait.kind = Wait::kNone;
  }
}

void Machine::deadlock(const char* why) {
  std::string text = std::string("deadlock: ") + why;
  char part[512];
  int shown = 0;
  for (auto& cluster : resident)
    for (auto& c : cluster->ctas)
      for (auto& w : c->warps) {
        if (w->done || ++shown > 40) continue;
        snprintf(part, sizeof part, "\n  CTA (%u, %u, %u) warp %u at PTX line %d: ", c->id[0], c->id[1], c->id[2],
                 w->index, w->program->code[static_cast<size_t>(w->pc())].line);
        text += part;
        const Wait& x = w->wait;
        if (x.kind == Wait::kMbarrier || w->timed_out) {
          const Mbarrier& b = c->mbarrier(x.address);
          snprintf(part, sizeof part,
                   "waits for parity %u of the mbarrier at shared +%u: phase %u, %u of %u arrivals and %lld bytes "
                   "missing, %llu phases done",
                   x.parity, (x.address & 0xFFFFFF) - kReservedShared, b.phase, b.pending, b.count,
                   static_cast<long long>(b.bytes), static_cast<unsigned long long>(b.phases));
          text += part;
        } else if (x.kind == Wait::kNamed) {
          const NamedBarrier& b = c->named[x.address];
          snprintf(part, sizeof part, "waits at barrier %u: %u of %u threads have arrived", x.address, b.arrived,
                   b.expected);
          text += part;
        } else if (x.kind == Wait::kCluster) {
          text += "waits at the cluster barrier";
        } else {
          text += "runs";
        }
      }
  throw Deadlock(text);
}

}  // namespace ptxemu
