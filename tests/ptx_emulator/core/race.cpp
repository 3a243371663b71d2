#include "race.h"

namespace ptxemu {
namespace {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

const char* kKindNames[] = {"warp",          "TMA load",           "tensor core",      "cp.async of warp",
                            "wgmma of warp", "bulk store of warp", "st.async of warp", "tcgen05.st of warp"};

}  // namespace

Race::Race(Cluster& cluster) : cluster_(cluster), shared_(cluster.ctas.size()), tmem_(cluster.ctas.size()) {
  names_.push_back("nobody");
  clocks_.push_back({0});
  for (size_t i = 0; i < cluster.ctas.size(); ++i) shared_[i].granules.resize(cluster.ctas[i]->shared.size() / 4);
}

u32 Race::agent(Kind kind, const Cta& cta, u32 index) {
  const u64 key = u64(kind) << 56 | u64{cta.rank} << 40 | index;
  auto found = ids_.find(key);
  if (found != ids_.end()) return found->second;
  const u32 id = static_cast<u32>(clocks_.size());
  ids_[key] = id;
  std::string name = kKindNames[kind];
  if (kind == kTmaOf)
    name += " of mbarrier +" + std::to_string(index);
  else if (kind != kTensorPipe)
    name += " " + std::to_string(index);
  if (cluster_.ctas.size() > 1) name += " of CTA " + std::to_string(cta.rank);
  names_.push_back(name);
  clocks_.emplace_back(id + 1, 0);
  clocks_[id][id] = 1;
  return id;
}

u32 Race::issue(Kind kind, const Cta& cta, u32 index, Warp& issuer) {
  const u32 w = warp(issuer), a = agent(kind, cta, index);
  merge(clocks_[a], clocks_[w]);
  ++clocks_[a][a];
  return a;
}

void Race::hit(const char* space, const char* verb, u32 agent, i32 line, const char* earlier, u32 other,
               i32 other_line) {
  cluster_.machine->report("race in %s memory: %s by %s (PTX line %d) not ordered after %s by %s (line %d)", space,
                           verb, names_[agent].c_str(), line, earlier, names_[other].c_str(), other_line);
}

void Race::access(Granule& g, const char* space, u32 agent, bool write, i32 line) {
  if (g.agent && !ordered(g.agent, g.clock, agent))
    hit(space, write ? "write" : "read", agent, line, "the write", g.agent, g.line);
  if (write) {
    for (const Read& r : g.reads)
      if (!ordered(r.agent, r.clock, agent)) hit(space, "write", agent, line, "a read", r.agent, 0);
    g.reads.clear();
    g.agent = agent, g.clock = now(agent), g.line = line;
    return;
  }
  for (Read& r : g.reads)
    if (r.agent == agent) {
      r.clock = now(agent);
      return;
    }
  g.reads.push_back({agent, now(agent)});
}

void Race::shared(const Cta& cta, u32 agent, u32 offset, u32 bytes, bool write, i32 line) {
  auto& granules = shared_[cta.rank].granules;
  for (u32 g = offset / 4; g < (offset + bytes + 3) / 4; ++g) access(granules[g], "shared", agent, write, line);
}

void Race::shared_chunks(const Cta& cta, u32 agent, const std::vector<u32>& offsets, u32 bytes, bool write, i32 line) {
  for (u32 offset : offsets) shared(cta, agent, offset, bytes, write, line);
}

void Race::tmem(const Cta& cta, u32 agent, u32 quarters, u32 column, u32 count, bool write, i32 line) {
  auto& granules = tmem_[cta.rank].granules;
  if (granules.empty()) granules.resize(4 * 512);
  for (u32 q = 0; q < 4; ++q)
    if (quarters >> q & 1)
      for (u32 c = column; c < column + count; ++c) access(granules[q * 512 + c], "tensor", agent, write, line);
}

void Race::release(u64 object, u32 agent) {
  merge(pending_[object], clocks_[agent]);
  ++clocks_[agent][agent];
}
void Race::release(u64 object, const Clock& clock) { merge(pending_[object], clock); }

void Race::complete(u64 object) {
  auto found = pending_.find(object);
  if (found == pending_.end()) return;
  merge(complete_[object], found->second);
  pending_.erase(found);
}

void Race::acquire(u64 object, u32 agent) {
  auto found = complete_.find(object);
  if (found != complete_.end()) merge(clocks_[agent], found->second);
}

void Race::join(u32 agent, u32 other, u32 clock) {
  Clock& c = clocks_[agent];
  if (c.size() <= other) c.resize(other + 1, 0);
  c[other] = std::max(c[other], clock);
}
void Race::join(u32 agent, const Clock& clock) { merge(clocks_[agent], clock); }

}  // namespace ptxemu
