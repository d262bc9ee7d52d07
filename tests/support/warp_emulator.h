// A multiprocessor on the CPU: enough of CUDA to run kernels/cuda/paged_decode.cu, lane by lane.
//
// Invariant: nothing is kinder than a GPU. A copy into shared memory happens as late as it may:
// when its lane waits for it. Shared memory holds NaN before a thread block starts. A lane runs on
// until it needs the others, so what it does without waiting for them is done before they begin. A
// copy that nobody waits for, a bad address, and threads that wait for ever end a launch.
//
// Lanes are coroutines of one thread, switched where they wait for each other. Thread blocks run
// one after another, the last one first. A kernel is included behind this file, without its
// instructions.cuh, whose functions are these.
//
// It also counts what a CPU does not feel: cycles that ldmatrix loses to bank conflicts.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x, y; };

constexpr int LANES = 32, MOST_THREADS = 512, STACK = 1 << 17, MOST_SHARED = 227 * 1024;
constexpr unsigned ALL = 0xffffffff;
enum Type { FLOAT16, BFLOAT16 };
using Half = unsigned short;

uint4 shared[MOST_SHARED / 16];  // what a kernel declares as extern
static Index blockIdx, gridDim;
extern "C" {
long long copied_bytes, extra_cycles;  // of the last launch
const char* failure;                   // what a GPU would not have forgiven, or null
}

// Lanes that wait for each other ------------------------------------------------------------------

struct Copy { unsigned to; const Half* from; bool real; };
struct Barrier { int arrived = 0, passed = 0; };
struct Thread {
  jmp_buf state;
  ucontext_t start;
  bool started, done;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

static Thread threads[MOST_THREADS];
static char stacks[MOST_THREADS][STACK];
static Barrier warp_barriers[MOST_THREADS / LANES], block_barrier;
static long long slots[MOST_THREADS][4];  // what the lanes of a warp show each other
static int num_threads, current, idle;
static ucontext_t outside;
static void (*body)(void*);
static void* arguments;

struct ThreadIndex { operator int() const { return current; } };
static struct { ThreadIndex x; } threadIdx;

[[noreturn]] static void fail(const char* what) {
  failure = what;
  setcontext(&outside);
  std::abort();
}

[[noreturn]] static void resume(int next) {
  current = next;
  if (threads[next].started) _longjmp(threads[next].state, 1);
  threads[next].started = true;
  setcontext(&threads[next].start);
  std::abort();
}

static int next_thread() {
  for (int step = 1; step <= num_threads; step++)
    if (const int next = (current + step) % num_threads; !threads[next].done) return next;
  return -1;
}

static void wait_at(Barrier& barrier, int parties) {
  const int passed = barrier.passed;
  if (++barrier.arrived == parties) {
    barrier.arrived = idle = 0;
    barrier.passed++;
    return;
  }
  while (barrier.passed == passed) {
    if (idle++ > 4 * num_threads) fail("threads wait for each other for ever");
    if (!_setjmp(threads[current].state)) resume(next_thread());
  }
}

static void run_thread() {
  body(arguments);
  threads[current].done = true;
  idle = 0;
  if (const int next = next_thread(); next >= 0) resume(next);
  setcontext(&outside);
}

static void __syncthreads() { wait_at(block_barrier, num_threads); }
static void __syncwarp() { wait_at(warp_barriers[current / LANES], LANES); }
static void __threadfence() {}
static int atomicAdd(int* counter, int amount) { return (*counter += amount) - amount; }

template <typename T>
static T shuffle(T value, int from) {
  std::memcpy(slots[current], &value, sizeof value);
  __syncwarp();
  std::memcpy(&value, slots[current / LANES * LANES + from], sizeof value);
  __syncwarp();
  return value;
}
template <typename T>
static T __shfl_sync(unsigned, T value, int from) { return shuffle(value, from); }
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffle(value, (current % LANES) ^ mask);
}

// Shared memory, and the instructions of instructions.cuh -----------------------------------------

static size_t __cvta_generic_to_shared(const void* at) {
  return static_cast<const char*>(at) - reinterpret_cast<const char*>(shared);
}
static char* shared_at(unsigned at, unsigned size = 16) {
  if (at % size || at + size > sizeof shared) fail("a bad address in shared memory");
  return reinterpret_cast<char*>(shared) + at;
}

// Cycles beyond one that eight accesses of 16 bytes take: the worst of the eight groups of banks.
static int conflicts(const unsigned* addresses) {
  int at[8] = {};
  for (int i = 0; i < 8; i++) at[addresses[i] / 16 % 8]++;
  return *std::max_element(at, at + 8) - 1;
}
static void copy_async(unsigned to, const Half* from, bool real) {
  if (reinterpret_cast<size_t>(from) % 16) fail("a copy from no multiple of 16 bytes");
  threads[current].open.push_back({to, from, real});
  copied_bytes += real ? 16 : 0;
}
static void close_group() {
  threads[current].groups.push_back(std::move(threads[current].open));
  threads[current].open.clear();
}
template <int PENDING>
static void wait_for_groups() {
  auto& groups = threads[current].groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (const Copy& copy : groups.front())
      copy.real ? std::memcpy(shared_at(copy.to), copy.from, 16)
                : std::memset(shared_at(copy.to), 0, 16);
  __syncwarp();
}

static unsigned pair(Half low, Half high) { return low | static_cast<unsigned>(high) << 16; }

template <bool TRANSPOSED>
static void load_matrices(unsigned (&to)[4], unsigned from) {
  const int lane = current % LANES, warp = current - lane;
  slots[current][0] = from;
  __syncwarp();
  for (int m = 0; m < 4; m++) {
    const auto element = [&](int row, int column) {
      const unsigned at = static_cast<unsigned>(slots[warp + m * 8 + row][0]);
      return reinterpret_cast<const Half*>(shared_at(at))[column];
    };
    const int row = lane / 4, column = lane % 4 * 2;
    to[m] = TRANSPOSED ? pair(element(column, row), element(column + 1, row))
                       : pair(element(row, column), element(row, column + 1));
  }
  if (lane % 8 == 0) {
    unsigned rows[8];
    for (int i = 0; i < 8; i++) rows[i] = static_cast<unsigned>(slots[current + i][0]);
    extra_cycles += conflicts(rows);
  }
  __syncwarp();
}

static unsigned transpose(unsigned matrix) {
  const int lane = current % LANES, warp = current - lane;
  slots[current][0] = matrix;
  __syncwarp();
  const auto element = [&](int row, int column) {
    return static_cast<Half>(slots[warp + row * 4 + column / 2][0] >> (column % 2 * 16));
  };
  const unsigned to = pair(element(lane % 4 * 2, lane / 4), element(lane % 4 * 2 + 1, lane / 4));
  __syncwarp();
  return to;
}

template <Type TYPE>
static float number(Half bits) {
  if (TYPE == FLOAT16) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
  }
  const unsigned wide = static_cast<unsigned>(bits) << 16;
  float single;
  std::memcpy(&single, &wide, 4);
  return single;
}
template <Type TYPE>
static Half rounded(float single) {
  Half bits;
  if (TYPE == FLOAT16) {
    const _Float16 half = static_cast<_Float16>(single);
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  unsigned wide;
  std::memcpy(&wide, &single, 4);
  return std::isnan(single) ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
template <Type TYPE>
static unsigned pack(float low, float high) {
  return pair(rounded<TYPE>(low), rounded<TYPE>(high));
}

template <Type TYPE>
static void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = current % LANES, warp = current - lane;
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 3; i++)
    slots[current][i] = mine[2 * i] | static_cast<long long>(mine[2 * i + 1]) << 32;
  __syncwarp();
  const auto half = [&](int of, int index, int upper) {
    const auto word = static_cast<unsigned>(slots[warp + of][index / 2] >> (index % 2 * 32));
    return number<TYPE>(static_cast<Half>(word >> (upper * 16)));
  };
  for (int r = 0; r < 4; r++) {
    const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
    for (int k = 0; k < 16; k++)
      sum[r] += half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) *
                half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
  }
  __syncwarp();
}

// A launch ----------------------------------------------------------------------------------------

static void launch(int grid_x, int grid_y, int block, void (*kernel)(void*), void* given) {
  num_threads = block, body = kernel, arguments = given;
  gridDim = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y)};
  copied_bytes = extra_cycles = 0, failure = nullptr;
  for (int at = grid_x * grid_y - 1; at >= 0; at--) {
    blockIdx = {static_cast<unsigned>(at % grid_x), static_cast<unsigned>(at / grid_x)};
    std::memset(shared, 0xff, sizeof shared);
    for (int t = 0; t < block; t++) {
      Thread& thread = threads[t];
      thread.started = thread.done = false;
      thread.open.clear(), thread.groups.clear();
      getcontext(&thread.start);
      thread.start.uc_stack = {stacks[t], 0, STACK};
      thread.start.uc_stack.ss_size = STACK;
      makecontext(&thread.start, run_thread, 0);
    }
    volatile bool began = false;
    getcontext(&outside);
    if (!began) {
      began = true;
      resume(0);
    }
    for (int t = 0; t < block; t++)
      for (const auto& group : threads[t].groups)
        if (!group.empty()) failure = "a copy that nobody waited for";
    if (failure) return;
  }
}
