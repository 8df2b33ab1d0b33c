// The kernels of the resident loop on a GPU: one block each, but for the one that ends a step.
// Nothing here has run on a GPU yet; see cuda_port.hpp.
#include <cuda/atomic>

#include "cuda_port.hpp"

namespace {

using namespace weft::resident;

// The device itself.
struct Cuda {
  using Graph = cudaGraphExec_t;

  template <class T>
  using Shared = cuda::atomic_ref<T, cuda::thread_scope_system>;

  __device__ int64_t lane() const { return threadIdx.x; }
  __device__ int64_t lanes() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool one) const { return __syncthreads_or(one); }
  __device__ void fence() const { __threadfence_system(); }
  template <class T>
  __device__ T load(T& word) const {
    return Shared<T>(word).load(cuda::memory_order_acquire);
  }
  template <class T>
  __device__ void store(T& word, T value) const {
    Shared<T>(word).store(value, cuda::memory_order_release);
  }
  __device__ int64_t now_ns() const {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ void rest() const { __nanosleep(100); }
  __device__ bool launch(Graph graph) const {
    return cudaGraphLaunch(graph, cudaStreamGraphFireAndForget) == cudaSuccess;
  }
  __device__ bool relaunch() const {
    return cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch) == cudaSuccess;
  }
};

using DeviceLoop = Loop<Cuda::Graph>;

}  // namespace

// The only node of a graph that launches those of steps.
extern "C" __global__ void __launch_bounds__(kLanes, 1) weft_serve(const DeviceLoop* loop) {
  Cuda gpu;
  serve(*loop, gpu);
}

// The last node of a step.
extern "C" __global__ void weft_step_done(LoopState* state) {
  Cuda().store(state->computed, state->launched);
}

// The first node in the body of a WHILE node; a SWITCH node with the steps follows.
extern "C" __global__ void __launch_bounds__(kLanes, 1)
    weft_between(const DeviceLoop* loop, cudaGraphConditionalHandle again,
                 cudaGraphConditionalHandle bucket) {
  Cuda gpu;
  const bool more = between(*loop, gpu);
  if (threadIdx.x != 0) return;
  cudaGraphSetConditional(again, more);
  cudaGraphSetConditional(bucket, more ? loop->buckets[loop->rows.count] : kBuckets);
}
