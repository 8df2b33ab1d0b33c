// A block of a GPU as the lanes of the resident loop: that the header compiles for the device.
#include "resident/loop.hpp"

using namespace weft::resident;

namespace {

struct BlockPort {
  volatile unsigned* bell;
  unsigned heard;
  volatile long long* board;
  long long deadline;

  __device__ int64_t lane() const { return threadIdx.x; }
  __device__ int64_t lanes() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool one) const { return __syncthreads_or(one); }
  __device__ bool asked() const { return any(threadIdx.x == 0 && *bell != heard); }
  __device__ bool late() const { return any(threadIdx.x == 0 && clock64() > deadline); }
  __device__ void publish(const int64_t* given, int64_t count) const {
    for (int64_t i = lane(); i < count; i += lanes()) board[i] = given[i];
    __threadfence_system();
  }
  __device__ bool launch(const Rows& rows, int64_t* given) const {
    for (int64_t i = lane(); i < rows.count; i += lanes()) given[i] = rows.ids[i] + 1;
    __syncthreads();
    return true;
  }
};

}  // namespace

__global__ void serve(Rows rows, int64_t steps, unsigned* bell, long long* board, int64_t* done,
                      End* end) {
  BlockPort port{bell, *bell, board, clock64() + 1000000};
  End why = End::none;
  const int64_t count = run(rows, steps, port, why);
  if (threadIdx.x == 0) {
    *done = count;
    *end = why;
  }
}
