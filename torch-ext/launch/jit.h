// Programs that were compiled at run time, for the backend "jit": they stand in for the embedded ones, which keep
// saying what a program is called and what parameters it takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "image.h"

namespace m3_sparse::launch::jit {

// Whether this thread's launches take supplied programs; returns what it was before.
bool set_active(bool on);
bool active();

// What stands in for an embedded image. Where nothing was supplied, throws "m3_sparse: jit: needs ID KERNEL ENTRY",
// which _jit.py reads: it compiles that program, supplies it and calls the operator again.
const Image& supplied(const Image& embedded);

// `id` is one that `supplied` has asked for; `params` are size and alignment of each parameter, in turns. Throws if
// they aren't those of the embedded program. An id is supplied once.
void supply(int id, const void* cubin, std::size_t bytes, const std::vector<std::int32_t>& params,
            const unsigned (&block)[3], unsigned dynamic_smem);

}  // namespace m3_sparse::launch::jit
