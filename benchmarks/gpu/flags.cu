// How fast a CPU and a GPU signal each other through mapped memory, and what may wait inside a graph.
// Prints figures as lines of JSON. nvcc -std=c++17 -O3 -arch=sm_90 flags.cu -o flags -lcuda
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda/atomic>
#include <vector>

#define CHECK(call)                                                                 \
  do {                                                                              \
    auto status = (call);                                                           \
    if (static_cast<int>(status) != 0) {                                            \
      std::fprintf(stderr, "%s:%d %s: error %d\n", __FILE__, __LINE__, #call,       \
                   static_cast<int>(status));                                       \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (0)

namespace {

using Clock = std::chrono::steady_clock;
using Flag = cuda::atomic_ref<unsigned, cuda::thread_scope_system>;

struct alignas(128) Line {  // a flag with a cache line of its own
  unsigned value;
  unsigned padding[31];
};

constexpr int ROUNDS = 5000;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void figure(const char* name, double value, const char* unit) {
  std::printf("{\"name\": \"%s\", \"value\": %.3f, \"unit\": \"%s\"}\n", name, value, unit);
}

void percentiles(const char* name, std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  char full[128];
  std::snprintf(full, sizeof full, "%s, median", name);
  figure(full, times[times.size() / 2], "us");
  std::snprintf(full, sizeof full, "%s, P99", name);
  figure(full, times[times.size() * 99 / 100], "us");
}

void wait_for(Flag flag, unsigned value) {
  while (flag.load(cuda::memory_order_acquire) != value) {
  }
}

__global__ void answer(Line* in, Line* out, unsigned rounds) {
  for (unsigned i = 1; i <= rounds; ++i) {
    while (Flag(in->value).load(cuda::memory_order_acquire) != i) {
    }
    Flag(out->value).store(i, cuda::memory_order_release);
  }
}

__global__ void read_in_a_row(Line* lines, unsigned reads, unsigned long long* nanoseconds) {
  unsigned long long start, end;
  unsigned sum = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  for (unsigned i = 0; i < reads; ++i)  // each address depends on the value before
    sum += Flag(lines[sum & 1].value).load(cuda::memory_order_acquire);
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  *nanoseconds = (end - start) / reads + (sum == 12345);
}

__global__ void raise(Line* line, unsigned value) {
  Flag(line->value).store(value, cuda::memory_order_release);
}

__global__ void spin_until(Line* line, unsigned value) {
  while (Flag(line->value).load(cuda::memory_order_acquire) < value) __nanosleep(64);
}

void measure_reads(Line* device, cudaStream_t stream) {
  unsigned long long* nanoseconds;
  CHECK(cudaMallocManaged(&nanoseconds, sizeof *nanoseconds));
  read_in_a_row<<<1, 1, 0, stream>>>(device, 2000, nanoseconds);
  CHECK(cudaStreamSynchronize(stream));
  figure("GPU reads a mapped line of the host", *nanoseconds * 1e-3, "us");
}

void measure_round_trip(Line* host, Line* device, cudaStream_t stream) {
  Flag in(host[0].value), out(host[1].value);
  in.store(0);
  out.store(0);
  answer<<<1, 1, 0, stream>>>(device, device + 1, ROUNDS);
  std::vector<double> times;
  for (unsigned i = 1; i <= ROUNDS; ++i) {
    const auto start = Clock::now();
    in.store(i, cuda::memory_order_release);
    wait_for(out, i);
    times.push_back(microseconds_since(start));
  }
  CHECK(cudaStreamSynchronize(stream));
  percentiles("CPU to GPU to CPU through mapped flags", times);
}

void measure_stream_waits(Line* host, Line* device, cudaStream_t stream) {
  Flag go(host[2].value), back(host[3].value);
  std::vector<double> times;
  for (unsigned i = 1; i <= 2000; ++i) {
    CHECK(cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(device + 2), i,
                              CU_STREAM_WAIT_VALUE_GEQ));
    CHECK(cuStreamWriteValue32(stream, reinterpret_cast<CUdeviceptr>(device + 3), i, 0));
    for (auto start = Clock::now(); microseconds_since(start) < 20;) {
    }
    const auto start = Clock::now();
    go.store(i, cuda::memory_order_release);
    wait_for(back, i);
    times.push_back(microseconds_since(start));
  }
  percentiles("wait and write of a stream, round trip", times);
}

void measure_spinning_kernel(Line* host, Line* device, cudaStream_t stream) {
  Flag before(host[5].value), after(host[6].value), go(host[7].value);
  std::vector<double> times;
  for (int i = 0; i < 2000; ++i) {
    before.store(0);
    after.store(0);
    go.store(0);
    raise<<<1, 1, 0, stream>>>(device + 5, 1);
    spin_until<<<1, 1, 0, stream>>>(device + 7, 1);
    raise<<<1, 1, 0, stream>>>(device + 6, 1);
    wait_for(before, 1);
    const auto start = Clock::now();
    go.store(1, cuda::memory_order_release);
    wait_for(after, 1);
    times.push_back(microseconds_since(start));
    CHECK(cudaStreamSynchronize(stream));
  }
  percentiles("a kernel that waits for the host, between two kernels", times);
}

}  // namespace

int main() {
  CHECK(cudaSetDevice(0));
  CUdevice gpu;
  CHECK(cuDeviceGet(&gpu, 0));
  int atomics = -1;
  CHECK(cuDeviceGetAttribute(&atomics, CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, gpu));
  figure("native atomics on memory of the host", atomics, "");
  Line *host, *device;
  CHECK(cudaHostAlloc(&host, 8 * sizeof(Line), cudaHostAllocMapped));
  for (int i = 0; i < 8; ++i) host[i].value = 0;
  CHECK(cudaHostGetDevicePointer(&device, host, 0));
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  measure_reads(device, stream);
  measure_round_trip(host, device, stream);
  measure_stream_waits(host, device, stream);
  measure_spinning_kernel(host, device, stream);
  return 0;
}
