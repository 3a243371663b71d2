// A hand-over by mbarriers that is right, and that compute-sanitizer's racecheck reports: why its reports on the
// prefill kernels (docs/measurements) are not taken for races.
//
//     nvcc -arch=sm_90a -o probe tests/gpu/racecheck_probe.cu && compute-sanitizer --tool racecheck --num-cuda-barriers
//     8 ./probe
//
// A lane writes a word and arrives at `full`; two warps wait for that phase, read the word and, behind __syncwarp, one
// lane of each arrives at `empty`; the writer waits for that phase before it writes again.
#include <cstdint>
#include <cstdio>

constexpr int kTurns = 8;

__device__ std::uint32_t address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void wait(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;"
      " @p bra done; bra again; done: }" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

__global__ void hand_over(int* sums) {
  __shared__ int word;
  __shared__ std::uint64_t full, empty;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    init(&full, 1);
    init(&empty, 2);
  }
  __syncthreads();
  if (warp == 0) {
    for (int turn = 0; turn < kTurns; ++turn) {
      wait(&empty, (turn & 1) ^ 1);
      if (lane == 0) {
        word = turn;
        arrive(&full);
      }
      __syncwarp();
    }
  } else {
    int sum = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      wait(&full, turn & 1);
      sum += word;
      __syncwarp();
      if (lane == 0) arrive(&empty);
      __syncwarp();
    }
    sums[threadIdx.x - 32] = sum;
  }
}

int main() {
  int *sums, host[64];
  cudaMalloc(&sums, sizeof host);
  hand_over<<<1, 96>>>(sums);
  const cudaError_t error = cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost);
  int wrong = error != cudaSuccess;
  for (int sum : host) wrong += sum != kTurns * (kTurns - 1) / 2;
  std::printf("%s, %d wrong\n", cudaGetErrorString(error), wrong);
  return wrong != 0;
}
