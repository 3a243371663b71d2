// The registry of handlers, control flow, and the interface that core.py calls.
#include <map>

#include "core.h"
#include "race.h"

namespace ptxemu {
namespace {

std::map<std::string, int>& names() {
  static std::map<std::string, int> instance;
  return instance;
}
std::vector<Handler>& handlers() {
  static std::vector<Handler> instance;
  return instance;
}

// First instruction of a basic block; imm: its number.
Status enter_block(Warp& w, const Instruction& in) {
  Frame& frame = w.stack.back();
  if (w.stack.size() > 1 && frame.pc == frame.reconverge) {
    w.stack.pop_back();  // the frame below continues here, for all lanes of the branch
    return Status::kJumped;
  }
  ++w.program->hits[static_cast<size_t>(in.imm)];
  return Status::kNext;
}

// x: target; imm: where the two sides meet again (the branch's immediate post-dominator), or -1.
Status branch(Warp& w, const Instruction& in) {
  Frame& frame = w.stack.back();
  const u32 taken = w.mask, stays = frame.mask & ~taken;
  const i32 target = in.x[0], next = frame.pc + 1, meet = static_cast<i32>(in.imm);
  if (stays == 0) {
    frame.pc = target;
    return Status::kJumped;
  }
  frame.pc = meet;
  if (w.stack.size() > 1 && meet == frame.reconverge) w.stack.pop_back();
  if (next != meet) w.stack.push_back({next, meet, stays});
  if (target != meet) w.stack.push_back({target, meet, taken});
  return Status::kJumped;
}

Status leave(Warp& w, const Instruction&) {
  const u32 dead = w.mask;
  const bool all = dead == w.stack.back().mask;
  if (!all) ++w.stack.back().pc;
  size_t kept = 0;
  for (Frame frame : w.stack) {
    frame.mask &= ~dead;
    if (frame.mask) w.stack[kept++] = frame;
  }
  w.stack.resize(kept);
  w.alive &= ~dead;
  if (w.stack.empty()) {
    w.done = true;
    if (--w.cta->live == 0) w.cta->leave();
    ++w.cta->machine->progress;
    w.cta->cluster->settle();
  }
  return Status::kJumped;
}

Status trap(Warp&, const Instruction&) { fail("trap"); }
Status nothing(Warp&, const Instruction&) { return Status::kNext; }
Status sleep(Warp&, const Instruction&) { return Status::kTurnOver; }

void register_all() {
  static bool done = false;
  if (done) return;
  done = true;
  register_handler("block", enter_block);
  register_handler("bra", branch);
  register_handler("exit", leave);
  register_handler("trap", trap);
  register_handler("nothing", nothing);
  register_handler("sleep", sleep);
  register_alu();
  register_float();
  register_convert();
  register_warp();
  register_memory();
  register_barriers();
  register_copies();
  register_mma();
  register_wgmma();
  register_tcgen05();
  register_tensor_memory();
}

}  // namespace

void register_handler(const std::string& name, Handler handler) {
  names()[name] = static_cast<int>(handlers().size());
  handlers().push_back(handler);
}

}  // namespace ptxemu

using namespace ptxemu;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int ptxemu_handler(const char* name) {
  register_all();
  auto found = names().find(name);
  return found == names().end() ? -1 : found->second;
}

EXPORT void* ptxemu_program(const EncodedInstruction* code, u64 length, const i32* operands, u64 num_operands,
                            const u8* image, u64 image_bytes, const Special* specials, u64 num_specials, u64 num_blocks,
                            u32 local_bytes, u32 shared_bytes) {
  register_all();
  auto* program = new Program;
  program->operands.assign(operands, operands + num_operands);
  program->image.assign(image, image + image_bytes);
  program->specials.assign(specials, specials + num_specials);
  program->hits.assign(num_blocks, 0);
  program->local_bytes = local_bytes, program->shared_bytes = shared_bytes;
  for (u64 i = 0; i < length; ++i) {
    const EncodedInstruction& e = code[i];
    program->code.push_back({handlers()[static_cast<size_t>(e.handler)], program->operands.data() + e.first, e.imm,
                             e.guard, static_cast<u16>(e.negated), static_cast<u16>(e.count), e.line});
  }
  return program;
}

EXPORT void ptxemu_free(void* program) { delete static_cast<Program*>(program); }

EXPORT const u64* ptxemu_hits(void* program) { return static_cast<Program*>(program)->hits.data(); }

// Fills up to `most` lines; returns their number.
EXPORT u64 ptxemu_real_waits(void* program, i32* lines, u64 most) {
  u64 n = 0;
  for (i32 line : static_cast<Program*>(program)->real_waits)
    if (n < most) lines[n++] = line;
  return n;
}

// 0: done; 1: error; 2: deadlock. `text` receives the error or the reports, one a line.
EXPORT int ptxemu_launch(void* program, LaunchSpec* spec, char* text, u64 text_bytes) {
  const auto put = [&](const std::string& s) { snprintf(text, text_bytes, "%s", s.c_str()); };
  try {
    Machine machine(static_cast<Program*>(program), spec);
    machine.run();
    std::string all;
    for (const std::string& r : machine.reports) all += r + "\n";
    put(all);
    return 0;
  } catch (const Deadlock& error) {
    put(error.what());
    return 2;
  } catch (const std::exception& error) {
    put(error.what());
    return 1;
  }
}
