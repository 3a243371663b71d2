#include "jit.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cubins.h"

namespace m3_sparse::launch::jit {
namespace {

struct Program {
  Image image{};
  std::vector<unsigned long long> cubin;  // words, for the alignment of the embedded ones
};

// Set once each and never freed: the driver may read an image as long as the process lives.
std::atomic<const Image*> asked[cubins::kNumImages];
std::atomic<const Program*> programs[cubins::kNumImages];
std::mutex supply_mutex;
thread_local bool is_active = false;

}  // namespace

bool set_active(bool on) {
  const bool before = is_active;
  is_active = on;
  return before;
}

bool active() { return is_active; }

const Image& supplied(const Image& embedded) {
  if (const Program* program = programs[embedded.id].load(std::memory_order_acquire)) return program->image;
  asked[embedded.id].store(&embedded, std::memory_order_release);
  throw std::runtime_error("m3_sparse: jit: needs " + std::to_string(embedded.id) + " " + embedded.kernel + " " +
                           embedded.entry);
}

void supply(int id, const void* cubin, std::size_t bytes, const std::vector<std::int32_t>& params,
            const unsigned (&block)[3], unsigned dynamic_smem) {
  const Image* embedded = id >= 0 && id < cubins::kNumImages ? asked[id].load(std::memory_order_acquire) : nullptr;
  if (embedded == nullptr)
    throw std::runtime_error("m3_sparse: jit: no launch has asked for program " + std::to_string(id));
  bool same = params.size() == 2 * static_cast<std::size_t>(embedded->num_params);
  for (int i = 0; same && i < embedded->num_params; ++i)
    same = params[2 * i] == embedded->params[i].size && params[2 * i + 1] <= embedded->params[i].align;
  if (!same)
    throw std::runtime_error(std::string("m3_sparse: jit: ") + embedded->entry +
                             " was compiled with other parameters than this build's launcher passes");
  std::lock_guard<std::mutex> guard(supply_mutex);
  if (programs[id].load(std::memory_order_acquire) != nullptr) return;  // another thread was first
  auto* program = new Program;
  program->cubin.resize((bytes + 7) / 8);
  std::memcpy(program->cubin.data(), cubin, bytes);
  program->image = *embedded;
  program->image.id += cubins::kNumImages;  // loaded beside the embedded one
  program->image.data = program->cubin.data();
  program->image.dynamic_smem = dynamic_smem;
  for (int i = 0; i < 3; ++i) program->image.block[i] = block[i];
  programs[id].store(program, std::memory_order_release);
}

}  // namespace m3_sparse::launch::jit
