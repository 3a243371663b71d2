// Reaching memory: which bytes an address names, and what an access means for the proxy and race checks.
#pragma once

#include "core.h"
#include "race.h"

namespace ptxemu {

// The order is that of SPACES in encode_memory.py.
enum class Space : int { kGlobal, kShared, kSharedCluster, kLocal, kParam, kGeneric };

// Host pointer of one lane's access, after all checks.
u8* reach(Warp& w, Space space, u64 address, u32 lane, u32 bytes, bool write);

// The CTA and offset that a shared address names; `cluster`: it may be another CTA's.
struct SharedPlace {
  Cta* cta;
  u32 offset;
};
SharedPlace shared_place(Warp& w, u64 address, u32 bytes, bool cluster, const char* what);

// Async-proxy access of 16-byte granules: no generic write without a proxy fence may lie there.
void check_proxy(Cta& cta, u32 offset, u32 bytes, const char* what, i32 line);

void group_commit(Warp& w, Stream& stream, Race::Kind kind);
void group_wait(Warp& w, Stream& stream, Race::Kind kind, u32 allowed);

}  // namespace ptxemu
