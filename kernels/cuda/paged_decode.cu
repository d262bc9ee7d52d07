// Paged decode attention in CUDA C++: what kernels/paged_decode.py says in Triton, said a thread at
// a time. It reads the same plan, fills the same workspace and gives the same output.
//
// Invariant: a warp alone fills, reads and frees its tiles in shared memory. So no barrier of the
// thread block stands in the loop over tokens; barriers come once, when the warps' sums are merged.
//
//   thread block (g, w)   item w of the plan (a chunk of one context), key/value head g
//   warp                  every WARPS-th tile of the chunk, 16 tokens each
//   lane                  copies 16 bytes at a time, and holds its share of each matrix product
//
//   memory      tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | tile 5 ...     of 16 tokens
//   warp          0        1        2        3        0        1
//
//   shared      [ K V of this tile | of the next | the one after ]   a ring of STAGES for each warp
//
// A tensor core multiplies 16 x 16 by 16 x 8 numbers. The 16 rows are tokens (later elements of V),
// the 8 columns are the query heads of the group, J <= 8, and what is no head is 0.
//
// Cost: K and V of the chunk once, 2 D elements a token. Shared memory: WARPS STAGES 64 D bytes.

#include "instructions.cuh"

constexpr int TOKENS = 16;   // of a tile: rows of a tensor core's first operand
constexpr int QUERIES = 8;   // columns of its second operand
constexpr int VECTOR = 8;    // elements of 2 bytes in a copy of 16 bytes
constexpr int PAD = 4;       // floats behind a row of sums, so that four rows start in other banks
constexpr float LEAST = -3e38f;  // the maximum before any score

// Where things lie in shared memory ---------------------------------------------------------------

// Bytes from the start of a tile to 16 bytes of a token. Eight rows of a matrix are read at once,
// and must lie in different banks: the place in a row is turned by the number of the row.
template <int D>
__device__ inline unsigned place(int token, int chunk) {
  return (token * (D / VECTOR) + (chunk ^ (token % 8))) * 16;
}

// Start copying K and V of a tile. Lane l knows where token l % 16 lies, and tells the others.
template <int D>
__device__ inline void copy_tile(unsigned tile, const Half* k, const Half* v, long long offset,
                                 int count, int lane) {
  constexpr int CHUNKS = D / VECTOR, ROWS = LANES / CHUNKS;  // of a token; tokens at a time
#pragma unroll
  for (int i = 0; i < TOKENS; i += ROWS) {
    const int token = i + lane / CHUNKS, chunk = lane % CHUNKS;
    const long long from = __shfl_sync(ALL, offset, token) + chunk * VECTOR;
    const unsigned to = tile + place<D>(token, chunk);
    copy_async(to, k + from, token < count);
    copy_async(to + TOKENS * D * 2, v + from, token < count);
  }
}

// Sums under different maxima ---------------------------------------------------------------------

struct Part {
  float4 out;
  float most, sum;
};

// Four elements of `count` parts as one part. The order is that of the parts, whoever merges them.
__device__ inline Part merge(const float* out, const float* most, const float* sum, int count,
                             int out_stride, int stride) {
  Part all = {{0, 0, 0, 0}, LEAST, 0};
#pragma unroll 8  // eight loads on their way at a time
  for (int p = 0; p < count; p++) all.most = fmaxf(all.most, most[p * stride]);
#pragma unroll 8
  for (int p = 0; p < count; p++) {
    const float weight = exp2f(most[p * stride] - all.most);
    const float4 part = *reinterpret_cast<const float4*>(out + p * out_stride);
    all.sum += weight * sum[p * stride];
    all.out.x += weight * part.x;
    all.out.y += weight * part.y;
    all.out.z += weight * part.z;
    all.out.w += weight * part.w;
  }
  return all;
}

template <Type TYPE>
__device__ inline void store(Half* to, const Part& all) {
  const float scale = 1 / (all.sum == 0 ? 1 : all.sum);
  *reinterpret_cast<uint2*>(to) = {pack<TYPE>(all.out.x * scale, all.out.y * scale),
                                   pack<TYPE>(all.out.z * scale, all.out.w * scale)};
}

// The kernel --------------------------------------------------------------------------------------

template <Type TYPE, int D, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS* LANES)
    paged_decode(const Half* q, const Half* k, const Half* v, const int* tables, const int* rows,
                 Half* out, const int* items, float* partial, float* most_of, float* sum_of,
                 int* arrived, float scale_log2, long long J, long long log_b,
                 long long table_stride, long long capacity, long long q_stride_x,
                 long long q_stride_h, long long stride_n, long long stride_b, long long stride_g) {
  extern __shared__ uint4 shared[];
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int g = blockIdx.x, w = blockIdx.y, H = gridDim.x * J, head = g * J;
  const int sequence = items[w], begin = items[capacity + w], end = items[2 * capacity + w];
  const int first = items[3 * capacity + w], count = items[4 * capacity + w];
  if (count == 0) return;
  const int* table = tables + (rows ? rows[sequence] : sequence) * table_stride;
  k += g * stride_g;
  v += g * stride_g;

  // The ring of this warp, and which tokens it holds.
  constexpr int STAGE = 2 * TOKENS * D * 2;  // bytes of K and V of a tile
  const unsigned ring =
      static_cast<unsigned>(__cvta_generic_to_shared(shared)) + warp * STAGES * STAGE;
  const int own = begin + warp * TOKENS;   // first token of its first tile
  constexpr int STRIDE = WARPS * TOKENS;   // from one of its tiles to the next
  const auto block_of = [&](int start) {   // of token lane % 16 of a tile
    const int position = start + lane % TOKENS;
    return position < end ? table[position >> log_b] : 0;
  };
  const auto copy = [&](int stage, int start, int block) {
    const int slot = (start + lane % TOKENS) & ((1 << log_b) - 1);
    if (start < end)
      copy_tile<D>(ring + stage * STAGE, k, v, block * stride_n + slot * stride_b, end - start,
                   lane);
    close_group();  // an empty group where there is no tile, so that the count stays right
  };
  int block[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; s++) block[s] = block_of(own + s * STRIDE);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy(s, own + s * STRIDE, block[s]);
  int next_block = block[STAGES - 1];  // looked up a tile ahead

  // Queries as second operand: lane l holds elements 2 (l % 4) and the next of head l / 4.
  unsigned query[D / 16][2];
  const bool real = lane / 4 < J;
  const Half* q_lane = q + sequence * q_stride_x + (head + lane / 4) * q_stride_h + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    query[i][0] = real ? *reinterpret_cast<const unsigned*>(q_lane + i * 16) : 0;
    query[i][1] = real ? *reinterpret_cast<const unsigned*>(q_lane + i * 16 + 8) : 0;
  }

  float most[2] = {LEAST, LEAST};
  float sum[2] = {0, 0};     // of this lane's tokens, for its two heads: 2 (lane % 4) and the next
  float weighted[D / 16][4] = {};  // V summed: elements lane / 4 and lane / 4 + 8, for both heads
  int stage = 0, free_stage = STAGES - 1;
  for (int start = own; start < end; start += STRIDE) {
    // All lanes are done with the tile before this one: its place takes the tile STAGES - 1 ahead.
    __syncwarp();
    copy(free_stage, start + (STAGES - 1) * STRIDE, next_block);
    next_block = block_of(start + STAGES * STRIDE);
    wait_for_groups<STAGES - 1>();
    const unsigned k_tile = ring + stage * STAGE, v_tile = k_tile + STAGE / 2;
    free_stage = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;

    // scores of 16 tokens (rows) and 8 heads (columns)
    float score[4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      unsigned keys[4];
      load_matrices<false>(keys, k_tile + place<D>(lane % 16, 2 * i + lane / 16));
      multiply<TYPE>(score, keys, query[i][0], query[i][1]);
    }
    float fade[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {  // a head; its tokens are lane / 4 and lane / 4 + 8
      const int token = start + lane / 4;
      score[r] = token < end ? score[r] * scale_log2 : LEAST;
      score[r + 2] = token + 8 < end ? score[r + 2] * scale_log2 : LEAST;
      float seen = fmaxf(most[r], fmaxf(score[r], score[r + 2]));
      for (int other = 4; other < LANES; other *= 2)  // over the lanes with other tokens
        seen = fmaxf(seen, __shfl_xor_sync(ALL, seen, other));
      fade[r] = exp2f(most[r] - seen);
      score[r] = exp2f(score[r] - seen);
      score[r + 2] = exp2f(score[r + 2] - seen);
      sum[r] = sum[r] * fade[r] + score[r] + score[r + 2];
      most[r] = seen;
    }
    // V transposed (rows are its elements) by the weights: tokens are now what is summed over.
    const unsigned early = transpose(pack<TYPE>(score[0], score[1]));
    const unsigned late = transpose(pack<TYPE>(score[2], score[3]));
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      unsigned values[4];
      const int token = lane % 8 + lane / 16 * 8;
      load_matrices<true>(values, v_tile + place<D>(token, 2 * i + lane / 8 % 2));
#pragma unroll
      for (int r = 0; r < 4; r++) weighted[i][r] *= fade[r % 2];
      multiply<TYPE>(weighted[i], values, early, late);
    }
  }

  // What the warps summed, through shared memory: it holds no tile any more.
  __syncthreads();
  constexpr int ROW = D + PAD;
  float* warp_out = reinterpret_cast<float*>(shared);    // [WARPS, QUERIES, ROW]
  float* warp_most = warp_out + WARPS * QUERIES * ROW;   // [WARPS, QUERIES]
  float* warp_sum = warp_most + WARPS * QUERIES;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = warp * QUERIES + lane % 4 * 2 + r;
    for (int other = 4; other < LANES; other *= 2) sum[r] += __shfl_xor_sync(ALL, sum[r], other);
    if (lane < 4) warp_most[row] = most[r], warp_sum[row] = sum[r];
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      warp_out[row * ROW + i * 16 + lane / 4] = weighted[i][r];
      warp_out[row * ROW + i * 16 + lane / 4 + 8] = weighted[i][r + 2];
    }
  }
  __syncthreads();
  out += static_cast<long long>(sequence * H + head) * D;
  for (int vector = thread; vector < J * D / 4; vector += WARPS * LANES) {
    const int j = vector / (D / 4), d = vector % (D / 4) * 4, part = w * H + head + j;
    const Part all = merge(warp_out + j * ROW + d, warp_most + j, warp_sum + j, WARPS,
                           QUERIES * ROW, QUERIES);
    if (count == 1) {
      store<TYPE>(out + j * D + d, all);
    } else {
      *reinterpret_cast<float4*>(partial + part * D + d) = all.out;
      if (d == 0) most_of[part] = all.most, sum_of[part] = all.sum;
    }
  }
  if (count == 1) return;

  // Whoever arrives last merges the parts. All threads have stored before one of them counts, and
  // the fences order that for the whole GPU: before counting, and before reading what others wrote.
  __shared__ bool last;
  __syncthreads();
  if (thread == 0) {
    int* counter = arrived + sequence * gridDim.x + g;
    __threadfence();
    last = atomicAdd(counter, 1) == count - 1;
    __threadfence();
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  const int part = first * H + head;
  for (int vector = thread; vector < J * D / 4; vector += WARPS * LANES) {
    const int j = vector / (D / 4), d = vector % (D / 4) * 4;
    store<TYPE>(out + j * D + d, merge(partial + (part + j) * D + d, most_of + part + j,
                                       sum_of + part + j, count, H * D, H));
  }
}
